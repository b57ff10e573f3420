"""BERT: the names that several other families have taken over."""

from cloze.model.families.family import Family, Modules, alike

ENCODER_FIELDS = {
    name: name
    for name in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "type_vocab_size", "pad_token_id", "tie_word_embeddings"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
        *("layer_norm_eps", "initializer_range"),
    )
}
FIELDS = ENCODER_FIELDS | {name: name for name in ("is_decoder", "add_cross_attention")}
LAYER: Modules = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "cross_attention.query": ("crossattention.self.query",),
    "cross_attention.key_value": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attention.output": ("crossattention.output.dense",),
    "cross_attention_norm": ("crossattention.output.LayerNorm",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}


def embeddings(prefix: str) -> Modules:
    """Names of BERT's embeddings in a family with this prefix."""
    return {
        "bert.embeddings.word": (f"{prefix}embeddings.word_embeddings",),
        "bert.embeddings.position": (f"{prefix}embeddings.position_embeddings",),
        "bert.embeddings.segment": (f"{prefix}embeddings.token_type_embeddings",),
        "bert.embeddings.norm": (f"{prefix}embeddings.LayerNorm",),
    }


def buffers(prefix: str) -> tuple[str, ...]:
    """Names in old folders that hold no weight, in a family with this prefix."""
    return (f"{prefix}embeddings.position_ids", f"{prefix}embeddings.token_type_ids")


class Bert(Family):
    """BERT (arXiv 1810.04805)."""

    class_prefixes = {"bert": "Bert"}
    class_suffixes = alike(
        "Model",
        "ForPreTraining",
        "ForMaskedLM",
        "ForNextSentencePrediction",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForMultipleChoice",
        "ForQuestionAnswering",
    )
    classes_with_pooler = (
        "BertForPreTraining",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForMultipleChoice",
    )
    fields = FIELDS
    required_values = {"position_embedding_type": "absolute"}
    prefix = "bert."
    modules = {
        **embeddings("bert."),
        "bert.pooler.dense": ("bert.pooler.dense",),
        "masked_lm.dense": ("cls.predictions.transform.dense",),
        "masked_lm.norm": ("cls.predictions.transform.LayerNorm",),
        "next_sentence.classifier": ("cls.seq_relationship",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    layers, layer = "bert.encoder.layer.{}.", LAYER
    decoder = ("cls.predictions.decoder.weight", "cls.predictions.bias")
    second_bias = "cls.predictions.decoder.bias"
    redundant_names = buffers("bert.")
    segment_weight = "bert.embeddings.token_type_embeddings.weight"
