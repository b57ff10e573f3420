"""ModernBERT: rotary positions, global and local attention, pre-norm, a gated feed-forward network."""

from collections.abc import Collection

from cloze.model.config import BertConfig, ModelError
from cloze.model.families.family import ACTIVATIONS, WITHOUT_PAIRS, Family, Json, our_activation
from cloze.model.families.rotary import rotary_bases

_BASES = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}  # of rotary frequencies, in its configuration


class ModernBert(Family):
    """ModernBERT (arXiv 2412.13663). It has no head for next sentences."""

    class_prefixes = {"modernbert": "ModernBert"}
    named_in_config = False
    class_suffixes = WITHOUT_PAIRS
    head_poolings = ("pooler", "cls", "mean")
    structure = {
        "position_embedding": "rotary",
        "type_vocab_size": 0,
        "norm_position": "pre",
        "first_attention_norm": False,
        "gated_feed_forward": True,
        "pooler": False,
    }
    fields = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "initializer_range",
        "pad_token_id": "pad_token_id",
        "tie_word_embeddings": "tie_word_embeddings",
        "local_attention_window": "local_attention",
        "norm_bias": "norm_bias",
        "decoder_bias": "decoder_bias",
    }
    aliases = {"sliding_window": ("local_attention", 2)}
    defaults = {
        "num_hidden_layers": 22,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 50283,
        "local_attention_window": 128,
        "norm_bias": False,
    }
    translated_fields = ("hidden_dropout_prob", "classifier_dropout", "classifier_transform", "linear_bias")
    activation = "hidden_activation"
    prefix = "model."
    modules = {
        "bert.embeddings.word": ("model.embeddings.tok_embeddings",),
        "bert.embeddings.norm": ("model.embeddings.norm",),
        "bert.encoder.final_norm": ("model.final_norm",),
    }
    heads = {  # all of them under the same names there
        "masked_lm": {"masked_lm.dense": ("head.dense",), "masked_lm.norm": ("head.norm",)},
        **{
            head: {"transform.dense": ("head.dense",), "transform.norm": ("head.norm",), ours: ("classifier",)}
            for head, ours in (
                ("sequence", "classifier"),
                ("choice", "classifier"),
                ("tokens", "classifier"),
                ("span", "span"),
            )
        },
    }
    layers = "model.layers.{}."
    layer = {
        "attention.qkv": ("attn.Wqkv",),
        "attention.output": ("attn.Wo",),
        "attention_norm": ("attn_norm",),
        "feed_forward.up": ("mlp.Wi",),
        "feed_forward.down": ("mlp.Wo",),
        "feed_forward_norm": ("mlp_norm",),
    }
    decoder = ("decoder.weight", "decoder.bias")
    null_fields = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")

    def can_express(self, config: BertConfig) -> bool:
        """Some layers attend locally."""
        return config.local_attention_window > 0 and super().can_express(config)

    def read_further(self, values: Json, fields: Json) -> Json:
        """Biases, activations, and which layers attend globally at which rotary base."""
        biases = {values.get(name, False) for name in ("attention_bias", "mlp_bias", "classifier_bias")}
        if len(biases) > 1:
            raise ModelError("config.json: found attention_bias, mlp_bias, classifier_bias unequal, expected all equal")
        activations = [values.get(f"{name}_activation", "gelu") for name in ("hidden", "classifier")]
        if len(set(activations)) > 1:
            raise ModelError(f"config.json: found hidden and classifier activation {activations}, expected them equal")
        bases = rotary_bases(
            values,
            {
                kind: values.get(f"{name}_rope_theta", _BASES[kind])
                for kind, name in (("full_attention", "global"), ("sliding_attention", "local"))
            },
        )
        every = values.get("global_attn_every_n_layers", 3)
        kinds = values.get("layer_types")
        expected = ["sliding_attention" if layer % every else "full_attention" for layer in range(len(kinds or []))]
        if kinds and kinds != expected:
            raise ModelError(f"config.json: found layer_types that are not global every {every} layers")
        return super().read_further(values, fields) | {
            "hidden_act": our_activation(activations[0]),
            "hidden_dropout_prob": values.get("mlp_dropout", 0.0),
            "linear_bias": biases.pop(),
            "rotary_theta": bases["full_attention"],
            "local_rotary_theta": bases["sliding_attention"],
            "global_attention_every": every,
            "classifier_transform": True,
            "classifier_dropout": values.get("classifier_dropout", 0.0),
        }

    def write(self, config: BertConfig) -> Json:
        """Biases, activations, rates of dropout, and which layers attend globally at which rotary base."""
        bases = {"full_attention": config.rotary_theta, "sliding_attention": config.local_rotary_theta}
        return {
            **super().write(config),
            "classifier_activation": ACTIVATIONS[config.hidden_act],
            **dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), config.linear_bias),
            **dict.fromkeys(("embedding_dropout", "mlp_dropout"), config.hidden_dropout_prob),
            "classifier_dropout": config.dropout_before_classifier,
            "global_attn_every_n_layers": config.global_attention_every,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        }

    def class_of(self, config: BertConfig, architecture: str, pooling: str | None) -> str | None:
        """Its classifiers have dense, activation and norm before them."""
        bare = architecture in ("BertModel", "BertForMaskedLM", "BertForPreTraining")
        return super().class_of(config, architecture, pooling) if bare or config.classifier_transform else None

    def head_of(self, names: Collection[str], architecture: str) -> str:
        """The name of the class alone tells spans from a classifier."""
        if "classifier.weight" not in names:
            return "masked_lm"
        return "span" if architecture.endswith("ForQuestionAnswering") else "tokens"

    def pooling(self, values: Json) -> str:
        """Read `classifier_pooling`."""
        pooling: str = values.get("classifier_pooling", "cls")
        return pooling

    def head_fields(self, pooling: str) -> Json:
        """Write `classifier_pooling`."""
        return {"classifier_pooling": "mean" if pooling == "mean" else "cls"}
