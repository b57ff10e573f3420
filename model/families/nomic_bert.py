"""Nomic BERT: BERT with rotary positions, a gated network, and no biases in its layers."""

from typing import ClassVar

from cloze.model.config import BertConfig
from cloze.model.families.bert import ENCODER_FIELDS
from cloze.model.families.family import ENCODERS_AND_CLASSIFIERS, Family, Json, Names, Part
from cloze.model.families.rotary import rotary_base, rotary_fields


class RotaryBert(Family):
    """What Nomic BERT and GTE share: BERT's layers with rotary positions and a gated network. Only their classifiers of
    sequences have a pooler, and no class has a head for next sentences. Names of weights are those of released folders,
    which transformers writes too.
    """

    named_in_config = False
    class_suffixes = ENCODERS_AND_CLASSIFIERS
    classes_with_pooler = ("BertForSequenceClassification",)
    heads_with_pooler = ("sequence",)
    fields = ENCODER_FIELDS
    base: ClassVar[float]
    """Of the rotary frequencies where config.json has none."""

    def read_further(self, values: Json, fields: Json) -> Json:
        """Read the base of rotary positions."""
        return super().read_further(values, fields) | {"rotary_theta": rotary_base(values, self.base)}

    def write(self, config: BertConfig) -> Json:
        """Write the base of rotary positions."""
        return {**super().write(config), **rotary_fields(config.rotary_theta)}


class NomicBert(RotaryBert):
    """Nomic BERT (arXiv 2402.01613)."""

    class_prefixes = {"nomic_bert": "NomicBert"}
    structure = {
        "position_embedding": "rotary",
        "gated_feed_forward": True,
        "linear_bias": False,
        "transform_bias": True,
    }
    defaults = {
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    base = 1000.0
    prefix = "nomic_bert."
    modules = {
        "bert.embeddings.word": ("nomic_bert.embeddings.word_embeddings",),
        "bert.embeddings.segment": ("nomic_bert.embeddings.token_type_embeddings",),
        "bert.embeddings.norm": ("nomic_bert.emb_ln",),
        "bert.pooler.dense": ("nomic_bert.pooler.dense",),
        "masked_lm.dense": ("cls.predictions.transform.dense",),
        "masked_lm.norm": ("cls.predictions.transform.layer_norm",),
        "classifier": ("classifier",),
    }
    layers = "nomic_bert.encoder.layers.{}."
    layer = {
        "attention.qkv": ("attn.Wqkv",),
        "attention.output": ("attn.out_proj",),
        "attention_norm": ("norm1",),
        "feed_forward.down": ("mlp.fc2",),
        "feed_forward_norm": ("norm2",),
    }
    decoder = ("cls.predictions.decoder.weight", "cls.predictions.bias")
    second_bias = "cls.predictions.decoder.bias"
    segment_weight = "nomic_bert.embeddings.token_type_embeddings.weight"
    sequence_weight = "nomic_bert.pooler.dense.weight"

    def read_further(self, values: Json, fields: Json) -> Json:
        """Its activation is SiLU where config.json has none."""
        return super().read_further({"hidden_act": "silu", **values}, fields)

    def split_parameters(self, config: BertConfig) -> Names:
        """The halves of the network's first matrix are two of theirs."""
        rows = config.intermediate_size
        return {"feed_forward.up.weight": (Part("mlp.fc12.weight", rows), Part("mlp.fc11.weight", rows))}
