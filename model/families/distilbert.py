"""DistilBERT: BERT without segments and pooler, under names of its own."""

from cloze.model.config import BertConfig
from cloze.model.families.family import WITHOUT_PAIRS, Family, Json


class DistilBert(Family):
    """DistilBERT (arXiv 1910.01108). Its classifiers of sequences and of choices have a dense layer with ReLU on the
    first token, which is what a pooler is; no other class has one, and none has a head for next sentences. The flag of
    sinusoidal positions says how their table began, which is a weight like another.
    """

    class_prefixes = {"distilbert": "DistilBert"}
    class_suffixes = WITHOUT_PAIRS
    classes_with_pooler = ("BertForSequenceClassification", "BertForMultipleChoice")
    heads_with_pooler = ("sequence", "choice")
    structure = {"type_vocab_size": 0, "pooler_activation": "relu"}
    fields = {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
        "initializer_range": "initializer_range",
        "pad_token_id": "pad_token_id",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    aliases = {
        "hidden_size": ("dim", 1),
        "num_attention_heads": ("n_heads", 1),
        "num_hidden_layers": ("n_layers", 1),
    }
    defaults = {"vocab_size": 30522, "num_hidden_layers": 6, "classifier_dropout": 0.2}
    activation = "activation"
    prefix = "distilbert."
    modules = {
        "bert.embeddings.word": ("distilbert.embeddings.word_embeddings",),
        "bert.embeddings.position": ("distilbert.embeddings.position_embeddings",),
        "bert.embeddings.norm": ("distilbert.embeddings.LayerNorm",),
        "masked_lm.dense": ("vocab_transform",),
        "masked_lm.norm": ("vocab_layer_norm",),
        "bert.pooler.dense": ("pre_classifier",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    layers = "distilbert.transformer.layer.{}."
    layer = {
        "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.output": ("attention.out_lin",),
        "attention_norm": ("sa_layer_norm",),
        "feed_forward.up": ("ffn.lin1",),
        "feed_forward.down": ("ffn.lin2",),
        "feed_forward_norm": ("output_layer_norm",),
    }
    decoder = ("vocab_projector.weight", "vocab_projector.bias")
    redundant_names = ("distilbert.embeddings.position_ids",)
    sequence_weight = "pre_classifier.weight"

    def write(self, config: BertConfig) -> Json:
        """A rate of dropout before the classifier is always given there."""
        return super().write(config) | {"seq_classif_dropout": config.dropout_before_classifier}
