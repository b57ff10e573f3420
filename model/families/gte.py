"""GTE: BERT with rotary positions and a gated network."""

from cloze.model.config import BertConfig
from cloze.model.families.family import Names, Part
from cloze.model.families.nomic_bert import RotaryBert


class Gte(RotaryBert):
    """GTE (arXiv 2407.19669). Its masked-LM head has GELU whatever the encoder's activation. In training, transformers'
    class also drops inside the feed-forward network.
    """

    class_prefixes = {"gte": "Gte"}
    structure = {
        "position_embedding": "rotary",
        "gated_feed_forward": True,
        "gate_bias": False,
        "hidden_act": "gelu",
    }
    defaults = {
        "vocab_size": 250048,
        "max_position_embeddings": 8192,
        "attention_probs_dropout_prob": 0.0,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    }
    required_values = {"hidden_act": "gelu"}
    base = 160_000.0
    prefix = "gte."
    modules = {
        "bert.embeddings.word": ("gte.embeddings.word_embeddings",),
        "bert.embeddings.segment": ("gte.embeddings.token_type_embeddings",),
        "bert.embeddings.norm": ("gte.embeddings.LayerNorm",),
        "bert.pooler.dense": ("gte.pooler.dense",),
        "masked_lm.dense": ("lm_head.dense",),
        "masked_lm.norm": ("lm_head.norm",),
        "classifier": ("classifier",),
    }
    layers = "gte.encoder.layer.{}."
    layer = {
        "attention.qkv": ("attention.qkv_proj",),
        "attention.output": ("attention.o_proj",),
        "attention_norm": ("attn_ln",),
        "feed_forward.down": ("mlp.down_proj",),
        "feed_forward_norm": ("mlp_ln",),
    }
    decoder = ("lm_head.decoder.weight", "lm_head.decoder.bias")
    sequence_weight = "gte.pooler.dense.weight"

    def split_parameters(self, config: BertConfig) -> Names:
        """The halves of the network's first matrix are the other way around."""
        rows, theirs = config.intermediate_size, "mlp.up_gate_proj.weight"
        return {"feed_forward.up.weight": (Part(theirs, rows, rows), Part(theirs, rows))}
