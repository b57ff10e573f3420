"""ALBERT: BERT with layers that share their weights, embeddings of a width of their own, and sentence order."""

from cloze.model.config import BertConfig, ModelError
from cloze.model.families.bert import ENCODER_FIELDS, buffers, embeddings
from cloze.model.families.family import ACTIVATIONS, Family, Json, alike


class Albert(Family):
    """ALBERT (arXiv 1909.11942). The classifier of its sentence order is ours of next sentences."""

    class_prefixes = {"albert": "Albert"}
    named_in_config = False
    class_suffixes = alike(
        "Model",
        "ForPreTraining",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForMultipleChoice",
        "ForQuestionAnswering",
    )
    classes_with_pooler = ("BertForPreTraining", "BertForSequenceClassification", "BertForMultipleChoice")
    fields = {
        **ENCODER_FIELDS,
        "classifier_dropout": "classifier_dropout_prob",
        "embedding_size": "embedding_size",
        "num_layer_groups": "num_hidden_groups",
    }
    defaults = {
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_layer_groups": 1,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": 0.1,
    }
    required_values = {"position_embedding_type": "absolute", "inner_group_num": 1}
    default_activation = "gelu_new"
    prefix = "albert."
    modules = {
        **embeddings("albert."),
        "bert.embeddings.projection": ("albert.encoder.embedding_hidden_mapping_in",),
        "bert.pooler.dense": ("albert.pooler",),
        "masked_lm.dense": ("predictions.dense",),
        "masked_lm.norm": ("predictions.LayerNorm",),
        "next_sentence.classifier": ("sop_classifier.classifier",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    layers = "albert.encoder.albert_layer_groups.{}.albert_layers.0."
    layer = {
        "attention.qkv": ("attention.query", "attention.key", "attention.value"),
        "attention.output": ("attention.dense",),
        "attention_norm": ("attention.LayerNorm",),
        "feed_forward.up": ("ffn",),
        "feed_forward.down": ("ffn_output",),
        "feed_forward_norm": ("full_layer_layer_norm",),
    }
    decoder = ("predictions.decoder.weight", "predictions.bias")
    second_bias = "predictions.decoder.bias"
    redundant_names = buffers("albert.")
    segment_weight = "albert.embeddings.token_type_embeddings.weight"
    null_fields = ("bos_token_id", "eos_token_id")

    def can_express(self, config: BertConfig) -> bool:
        """There is always a map from the embeddings' width to the encoder's."""
        shared = config.num_layer_groups is not None
        return shared and config.embedding_width != config.hidden_size and super().can_express(config)

    def read_further(self, values: Json, fields: Json) -> Json:
        """With embeddings of the encoder's width there is a map between them all the same, which ours lacks."""
        if fields["embedding_size"] == fields["hidden_size"]:
            raise ModelError(
                f"config.json: found embedding_size {fields['embedding_size']} with model_type albert, expected "
                "another than hidden_size: the map between them is not computed here"
            )
        return super().read_further(values, fields)

    def write(self, config: BertConfig) -> Json:
        """A rate of dropout before the classifier is always given there."""
        act = config.hidden_act
        return {
            **super().write(config),
            "hidden_act": "gelu_new" if act == "gelu_tanh" else ACTIVATIONS[act],
            "classifier_dropout_prob": config.dropout_before_classifier,
            "inner_group_num": 1,
        }
