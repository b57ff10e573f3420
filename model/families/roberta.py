"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with positions that begin after padding, and heads of their own names."""

from cloze.model.config import BertConfig, ModelError
from cloze.model.families.bert import FIELDS, LAYER, buffers, embeddings
from cloze.model.families.family import WITHOUT_PAIRS, Family, Json


class Roberta(Family):
    """RoBERTa (arXiv 1907.11692). Its masked-LM head has GELU whatever the encoder's activation; beside that head it
    has no pooler, and no class has a head for next sentences.
    """

    class_prefixes = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
    class_suffixes = WITHOUT_PAIRS
    classes_with_pooler = ("BertForSequenceClassification", "BertForMultipleChoice")
    heads_with_pooler = ("", "sequence", "choice", "tokens", "span")
    structure = {"hidden_act": "gelu", "is_decoder": False}
    fields = FIELDS
    defaults = {"pad_token_id": 1, "vocab_size": 30522}
    required_values = {
        "position_embedding_type": "absolute",
        "hidden_act": "gelu",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    prefix = "roberta."
    modules = {
        **embeddings("roberta."),
        "bert.pooler.dense": ("roberta.pooler.dense",),
        "masked_lm.dense": ("lm_head.dense",),
        "masked_lm.norm": ("lm_head.layer_norm",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    # Its classifier of sequences has a dense layer with tanh on the first token, which is what a pooler is.
    heads = {"sequence": {"bert.pooler.dense": ("classifier.dense",), "classifier": ("classifier.out_proj",)}}
    layers, layer = "roberta.encoder.layer.{}.", LAYER
    decoder = ("lm_head.decoder.weight", "lm_head.bias")
    second_bias = "lm_head.decoder.bias"
    redundant_names = buffers("roberta.")
    segment_weight = "roberta.embeddings.token_type_embeddings.weight"
    sequence_weight = "classifier.out_proj.weight"
    null_fields = ("bos_token_id", "eos_token_id")

    def read_further(self, values: Json, fields: Json) -> Json:
        """The number of positions, without those rows."""
        if (padding := fields["pad_token_id"]) is None:
            raise ModelError(
                f"config.json: found pad_token_id null with model_type {values['model_type']}, expected the id after "
                "which positions begin"
            )
        rows = fields.get("max_position_embeddings", BertConfig.max_position_embeddings)
        return super().read_further(values, fields | {"max_position_embeddings": rows - padding - 1})

    def write(self, config: BertConfig) -> Json:
        """Their number of positions counts the rows before the first one too."""
        return super().write(config) | {"max_position_embeddings": config.num_position_rows}

    def ignored_names(self, head: str) -> tuple[str, ...]:
        """The pooler of old folders of a classifier."""
        return tuple(f"{self.prefix}pooler.dense.{kind}" for kind in ("weight", "bias")) if head == "sequence" else ()
