"""A tiny shape of each family, by its own names of sizes: tests over all of them are complete when one is added."""

from __future__ import annotations

import dataclasses

from cloze.model.config import BertConfig
from cloze.model.families import BY_TYPE

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
}
# model_type -> what its shape has beside sizes, in its names.
OWN = {
    "electra": {"embedding_size": 16},
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), {"max_position_embeddings": 49, "type_vocab_size": 1}),
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "albert": {"embedding_size": 16},
    "deberta-v2": {
        **{"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8, "share_att_key": True},
        **{"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0},
        "conv_kernel_size": 3,
    },
    "mpnet": {"pad_token_id": 1, "max_position_embeddings": 50},
    "eurobert": {"num_key_value_heads": 1},
}


def tiny(kind: str, **changes: object) -> BertConfig:
    """The shape of this model_type, without dropout, with some fields of ours changed."""
    family = BY_TYPE[kind]
    sizes = {theirs: SIZES[ours] for ours, theirs in family.fields.items() if ours in SIZES}
    read = family.read({"model_type": kind, **sizes, **OWN.get(kind, {})})
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return dataclasses.replace(read, **{**without, "vocab_padding_multiple": 1, **changes})
