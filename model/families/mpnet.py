"""MPNet: RoBERTa without segments, with a bias of relative positions that all layers share."""

from cloze.model.config import BertConfig
from cloze.model.families.bert import ENCODER_FIELDS
from cloze.model.families.family import Json
from cloze.model.families.roberta import Roberta

_BUCKETS = 32  # whatever config.json says, in transformers


class MPNet(Roberta):
    """MPNet (arXiv 2004.09297). Its positions begin after row 1, whatever the id of padding is."""

    class_prefixes = {"mpnet": "MPNet"}
    structure = {
        **Roberta.structure,
        "type_vocab_size": 0,
        "relative_position_buckets": _BUCKETS,
        "pad_token_id": 1,
    }
    fields = {
        ours: theirs for ours, theirs in ENCODER_FIELDS.items() if ours not in ("type_vocab_size", "classifier_dropout")
    }
    translated_fields = ("classifier_dropout",)  # always the hidden states' there
    defaults = {"pad_token_id": 1, "vocab_size": 30527}
    required_values = {"hidden_act": "gelu", "relative_attention_num_buckets": _BUCKETS, "pad_token_id": 1}
    prefix = "mpnet."
    modules = {
        "bert.embeddings.word": ("mpnet.embeddings.word_embeddings",),
        "bert.embeddings.position": ("mpnet.embeddings.position_embeddings",),
        "bert.embeddings.norm": ("mpnet.embeddings.LayerNorm",),
        "bert.encoder.relative_bias": ("mpnet.encoder.relative_attention_bias",),
        "bert.pooler.dense": ("mpnet.pooler.dense",),
        "masked_lm.dense": ("lm_head.dense",),
        "masked_lm.norm": ("lm_head.layer_norm",),
        "classifier": ("classifier",),
        "span": ("qa_outputs",),
    }
    layers = "mpnet.encoder.layer.{}."
    layer = {
        "attention.qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.output": ("attention.attn.o",),
        "attention_norm": ("attention.LayerNorm",),
        "feed_forward.up": ("intermediate.dense",),
        "feed_forward.down": ("output.dense",),
        "feed_forward_norm": ("output.LayerNorm",),
    }
    redundant_names = ("mpnet.embeddings.position_ids",)
    segment_weight = ""

    def write(self, config: BertConfig) -> Json:
        """The number of classes of distances is a field there."""
        return super().write(config) | {"relative_attention_num_buckets": _BUCKETS}
