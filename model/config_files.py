"""config.json of a model folder: read, checked, and turned into a BertConfig. Imports no torch, which takes seconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloze.model.config import ROBERTAS, BertConfig, ModelError

Json = dict[str, Any]
"""Fields of config.json."""
# Bounds of a JSON file: 4 million labels take 64 MB; a configuration is nested 5 deep.
_MOST_BYTES = 64 << 20
_MOST_LEVELS = 64
OWN_MODEL_TYPE = "cloze"  # model_type in config.json of our own format
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}
_THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh"}
SEGMENTS = "segment_embeddings"  # false in config.json: the only segment's embedding is zero, as without segments
# Fields that BERT's configuration in transformers has under the same name, and ELECTRA's, which has one more.
BERT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "layer_norm_eps",
    "initializer_range",
    "pad_token_id",
    "tie_word_embeddings",
    "is_decoder",
    "add_cross_attention",
)
# Defaults of ELECTRA's configuration in transformers.
_ELECTRA_DEFAULTS = {
    "vocab_size": 30522,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
# Of RoBERTa's, XLM-RoBERTa's and CamemBERT's configurations.
_ROBERTA_DEFAULTS = {"pad_token_id": 1, "vocab_size": 30522}
MODERN_FIELDS = {  # ours -> ModernBERT's
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


def read_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file.

    Raises:
        ModelError: it is anything but a regular file of bounded size and depth that holds one object.
    """
    expected = "expected a model folder, as cloze export makes"
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: found no regular file, {expected}")
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ModelError(f"{path}: found {size:,} bytes, expected at most {_MOST_BYTES:,}; fetch the model again")
        values = json.loads(path.read_text(encoding="utf-8"))
    except ModelError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; {expected}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: found {type(values).__name__}, expected an object; fetch or export the model again")
    if not _is_shallow(values):
        raise ModelError(f"{path}: found values nested more than {_MOST_LEVELS} deep; fetch or export the model again")
    return values


def _is_shallow(value: object) -> bool:
    """Whether lists and objects are nested at most _MOST_LEVELS deep."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for each in level
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors that values of wrong types in a config.json cause in its readers into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ModelError(
            f"{folder / 'config.json'}: found a value of another kind than its field's ({error}); fix "
            "it, or fetch or export the model again"
        ) from error


def read_shape(folder: Path) -> BertConfig:
    """The shape of the model in a folder, by its config.json alone.

    Raises:
        ModelError: for what is missing, damaged or of another architecture.
    """
    values = read_object(folder / "config.json")
    with reading(folder):
        config = config_from_huggingface(values)
    return dataclasses.replace(config, type_vocab_size=0) if values.get(SEGMENTS) is False else config


def config_from_huggingface(values: Json) -> BertConfig:
    """BertConfig from the content of a config.json.

    Raises:
        ModelError: for unsupported architectures.
    """
    kind = values.get("model_type")
    if kind == OWN_MODEL_TYPE:
        known = {field.name for field in dataclasses.fields(BertConfig)}
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    if kind == "modernbert":
        return _modern_config(values)
    kinds = ("bert", "electra", *ROBERTAS)
    if kind not in kinds:
        raise ModelError(
            f"config.json: found model_type {kind!r}, expected {', '.join(kinds)}, modernbert or {OWN_MODEL_TYPE}"
        )
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(
            f"config.json: found position_embedding_type {values['position_embedding_type']!r}, expected absolute"
        )
    fields = {name: values[name] for name in BERT_FIELDS if name in values}
    if kind == "electra":
        fields = {**_ELECTRA_DEFAULTS, **fields, "pooler": False}
        fields["embedding_size"] = values.get("embedding_size", _ELECTRA_DEFAULTS["embedding_size"])
    if kind in ROBERTAS:
        fields = _roberta_fields(values, {**_ROBERTA_DEFAULTS, **fields})
    fields["pad_token_id"] = fields.get("pad_token_id") or 0  # transformers may say null
    return BertConfig(hidden_act=_activation(values.get("hidden_act", "gelu")), **fields)


def _roberta_fields(values: Json, fields: Json) -> Json:
    """`fields` of a RoBERTa as ours: its number of positions counts the rows before the first one too."""
    kind = values["model_type"]
    for name, expected in (("hidden_act", "gelu"), ("is_decoder", False), ("add_cross_attention", False)):
        if (found := values.get(name, expected)) != expected:
            raise ModelError(f"config.json: found {name} {found!r} with model_type {kind}, expected {expected!r}")
    if (padding := fields["pad_token_id"]) is None:
        raise ModelError(
            f"config.json: found pad_token_id null with model_type {kind}, expected the id after which positions begin"
        )
    rows = fields.get("max_position_embeddings", BertConfig.max_position_embeddings)
    return fields | {"family": kind, "max_position_embeddings": rows - padding - 1}


def _activation(name: str) -> Any:
    """Ours, one of `BertConfig.hidden_act`, for theirs."""
    if name not in _THEIR_ACTIVATIONS:
        raise ModelError(f"config.json: found activation {name!r}, expected one of {', '.join(_THEIR_ACTIVATIONS)}")
    return _THEIR_ACTIVATIONS[name]


def _modern_config(values: Json) -> BertConfig:
    fields = {ours: values[theirs] for ours, theirs in MODERN_FIELDS.items() if theirs in values}
    fields["pad_token_id"] = fields.get("pad_token_id") or 0  # as BERT's
    biases = {values.get(name, False) for name in ("attention_bias", "mlp_bias", "classifier_bias")}
    if len(biases) > 1:
        raise ModelError("config.json: found attention_bias, mlp_bias, classifier_bias unequal, expected all equal")
    activations = [values.get(f"{name}_activation", "gelu") for name in ("hidden", "classifier")]
    if len(set(activations)) > 1:
        raise ModelError(f"config.json: found hidden and classifier activation {activations}, expected them equal")
    bases = _rotary_bases(values)
    every = values.get("global_attn_every_n_layers", 3)
    kinds = values.get("layer_types")
    expected = ["sliding_attention" if layer % every else "full_attention" for layer in range(len(kinds or []))]
    if kinds and kinds != expected:
        raise ModelError(f"config.json: found layer_types that are not global every {every} layers")
    return BertConfig(
        **fields,
        hidden_act=_activation(activations[0]),
        hidden_dropout_prob=values.get("mlp_dropout", 0.0),
        linear_bias=biases.pop(),
        rotary_theta=bases["full_attention"],
        local_rotary_theta=bases["sliding_attention"],
        global_attention_every=every,
        position_embedding="rotary",
        type_vocab_size=0,
        norm_position="pre",
        first_attention_norm=False,
        gated_feed_forward=True,
        classifier_transform=True,
        classifier_dropout=values.get("classifier_dropout", 0.0),
        pooler=False,
    )


def _rotary_bases(values: Json) -> dict[str, float]:
    """Base of the rotary frequencies by kind of layer.

    Raises:
        ModelError: for scaled frequencies.
    """
    bases = {
        "full_attention": values.get("global_rope_theta", 160_000.0),
        "sliding_attention": values.get("local_rope_theta", 10_000.0),
    }
    for field in ("rope_scaling", "rope_parameters"):
        given = values.get(field) or {}
        layers = {layer: given.get(layer) or {} for layer in bases}
        for rope in (given, *layers.values()):
            kind = rope.get("rope_type") or rope.get("type") or "default"
            if kind != "default":
                raise ModelError(
                    f"config.json: found rope_type {kind!r} in {field}, expected default: scaled rotary "
                    "positions are not computed here; take a model without them"
                )
        bases = {layer: layers[layer].get("rope_theta", base) for layer, base in bases.items()}
    return bases
