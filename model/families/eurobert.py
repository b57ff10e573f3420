"""EuroBERT: Llama's layers, attending in both directions."""

from cloze.model.config import BertConfig, ModelError
from cloze.model.families.family import ENCODERS_AND_CLASSIFIERS, Family, Json, Names, Part
from cloze.model.families.rotary import rotary_base, rotary_fields

_POOLINGS = {"pooler": "bos", "pooled_mean": "mean", "late": "late"}  # ours -> theirs


class EuroBert(Family):
    """EuroBERT (arXiv 2503.05500). Its classifier of sequences has a dense layer with GELU, which is what a pooler is;
    no other class has one, nor a head for next sentences.
    """

    class_prefixes = {"eurobert": "EuroBert"}
    named_in_config = False
    class_suffixes = ENCODERS_AND_CLASSIFIERS
    classes_with_pooler = ("BertForSequenceClassification",)
    heads_with_pooler = ("sequence",)
    head_poolings = tuple(_POOLINGS)
    structure = {
        "position_embedding": "rotary",
        "type_vocab_size": 0,
        "embedding_norm": False,
        "normalization": "rms_norm",
        "norm_position": "pre",
        "gated_feed_forward": True,
        "pooler_activation": "gelu",
        "mlm_head": "linear",
    }
    fields = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout_prob",  # this and the next are ours alone
        "classifier_dropout": "classifier_dropout",
        "layer_norm_eps": "rms_norm_eps",
        "initializer_range": "initializer_range",
        "pad_token_id": "pad_token_id",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    translated_fields = ("linear_bias", "decoder_bias", "norm_bias")  # RMS norms have none
    defaults = {
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 128001,
        "tie_word_embeddings": False,
    }
    prefix = "model."
    modules = {
        "bert.embeddings.word": ("model.embed_tokens",),
        "bert.encoder.final_norm": ("model.norm",),
        "bert.pooler.dense": ("dense",),
        "classifier": ("classifier",),
    }
    layers = "model.layers.{}."
    layer = {
        "attention.output": ("self_attn.o_proj",),
        "attention_norm": ("input_layernorm",),
        "feed_forward.down": ("mlp.down_proj",),
        "feed_forward_norm": ("post_attention_layernorm",),
    }
    decoder = ("lm_head.weight", "lm_head.bias")
    sequence_weight = "dense.weight"
    null_fields = ("bos_token_id", "eos_token_id")

    def can_express(self, config: BertConfig) -> bool:
        """One field says the biases of feed-forward network and vocabulary projection, and attention has them alike."""
        return config.linear_bias == config.decoder_bias and super().can_express(config)

    def read_further(self, values: Json, fields: Json) -> Json:
        """Biases, and the base of rotary positions."""
        biases = {values.get(name, False) for name in ("attention_bias", "mlp_bias")}
        if len(biases) > 1:
            raise ModelError("config.json: found attention_bias and mlp_bias unequal, expected them equal")
        fields = super().read_further({"hidden_act": "silu", **values}, fields)
        if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
            fields["num_key_value_heads"] = None
        bias = biases.pop()
        return fields | {"linear_bias": bias, "decoder_bias": bias, "rotary_theta": rotary_base(values, 10_000.0)}

    def write(self, config: BertConfig) -> Json:
        """Biases, the base of rotary positions, and a number of keys that is always given there."""
        return {
            **super().write(config),
            **dict.fromkeys(("attention_bias", "mlp_bias"), config.linear_bias),
            **rotary_fields(config.rotary_theta),
            "num_key_value_heads": config.key_value_heads,
        }

    def pooling(self, values: Json) -> str:
        """Read `classifier_pooling`."""
        ours = {theirs: ours for ours, theirs in _POOLINGS.items()}
        found = values.get("classifier_pooling", "late")
        if found not in ours:
            raise ModelError(f"config.json: found classifier_pooling {found!r}, expected one of {', '.join(ours)}")
        return ours[found]

    def head_fields(self, pooling: str) -> Json:
        """Write `classifier_pooling`."""
        return {"classifier_pooling": _POOLINGS[pooling]}

    def split_parameters(self, config: BertConfig) -> Names:
        """Queries, keys and values are matrices of unequal sizes there; the network's first is two."""
        keys, inner = config.key_value_width, config.intermediate_size
        modules = {
            "attention.qkv": {
                "self_attn.q_proj": config.hidden_size,
                "self_attn.k_proj": keys,
                "self_attn.v_proj": keys,
            },
            "feed_forward.up": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        }
        return {
            f"{ours}.{kind}": tuple(Part(f"{module}.{kind}", rows) for module, rows in theirs.items())
            for ours, theirs in modules.items()
            for kind in ("weight", "bias")
        }
