"""ELECTRA: BERT with embeddings of a width of their own and without a pooler, and its detector of replaced tokens."""

from cloze.model.config import BertConfig
from cloze.model.families.bert import FIELDS, LAYER, buffers, embeddings
from cloze.model.families.family import DETECTOR, Family, alike


class Electra(Family):
    """ELECTRA (arXiv 2003.10555). Its masked-LM head has GELU whatever the encoder's activation."""

    class_prefixes = {"electra": "Electra"}
    named_in_config = False
    class_suffixes = {
        DETECTOR: "ForPreTraining",
        **alike("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering"),
    }
    head_poolings = ("pooler", "cls", "mean", "max")  # its heads read tokens
    structure = {"pooler": False, "hidden_act": "gelu", "is_decoder": False}
    fields = {**FIELDS, "embedding_size": "embedding_size"}
    defaults = {
        "vocab_size": 30522,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    required_values = {"position_embedding_type": "absolute", "hidden_act": "gelu", "is_decoder": False}
    prefix = "electra."
    modules = {
        **embeddings("electra."),
        "bert.embeddings.projection": ("electra.embeddings_project",),
        "masked_lm.dense": ("generator_predictions.dense",),
        "masked_lm.norm": ("generator_predictions.LayerNorm",),
        "detection.dense": ("discriminator_predictions.dense",),
        "detection.score": ("discriminator_predictions.dense_prediction",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    layers, layer = "electra.encoder.layer.{}.", LAYER
    decoder = ("generator_lm_head.weight", "generator_lm_head.bias")
    redundant_names = buffers("electra.")
    segment_weight = "electra.embeddings.token_type_embeddings.weight"

    def can_express(self, config: BertConfig) -> bool:
        """A width of the embeddings is given, even if it is the encoder's."""
        return config.embedding_size is not None and super().can_express(config)
