"""Model folders in and out: config.json, model.safetensors and the tokenizer's files.

A model that is BERT as `transformers` knows it is written for `transformers`. Variants that have no public
architecture there are written in our own format: the fields of BertConfig, and our own names of weights.
Either is read back by `load_pretrained`. The mapping between names is a pure function on state dicts, in both
directions.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import BertConfig, ModelError

StateDict = dict[str, Tensor]

OWN_MODEL_TYPE = "cloze"  # model_type in config.json of our own format
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")

# Modules: ours -> theirs, or several of theirs that ours stacks along the rows. {} is the number of a layer.
_EMBEDDINGS = {
    "bert.embeddings.word": ("bert.embeddings.word_embeddings",),
    "bert.embeddings.position": ("bert.embeddings.position_embeddings",),
    "bert.embeddings.segment": ("bert.embeddings.token_type_embeddings",),
    "bert.embeddings.norm": ("bert.embeddings.LayerNorm",),
}
_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "cross_attention.query": ("crossattention.self.query",),
    "cross_attention.key_value": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attention.output": ("crossattention.output.dense",),
    "cross_attention_norm": ("crossattention.output.LayerNorm",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
_HEADS = {
    "bert.pooler.dense": ("bert.pooler.dense",),
    "masked_lm.dense": ("cls.predictions.transform.dense",),
    "masked_lm.norm": ("cls.predictions.transform.LayerNorm",),
    "next_sentence.classifier": ("cls.seq_relationship",),
}
# Theirs that repeat another parameter or hold no weight: (name, only if tied).
_REPEATED = {
    "cls.predictions.decoder.weight": True,
    "cls.predictions.decoder.bias": False,
    "bert.embeddings.position_ids": False,
    "bert.embeddings.token_type_ids": False,
}


def huggingface_names(config: BertConfig) -> dict[str, tuple[str, ...]]:
    """Each of our parameters that a BERT of this configuration can have -> its names in `transformers`."""
    modules = _EMBEDDINGS | _HEADS
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"bert.encoder.layers.{layer}.", f"bert.encoder.layer.{layer}."
        modules |= {ours + key: tuple(theirs + name for name in names) for key, names in _LAYER.items()}
    names = {
        f"{our_module}.{kind}": tuple(f"{module}.{kind}" for module in their_modules)
        for our_module, their_modules in modules.items()
        for kind in ("weight", "bias")
    }
    names["masked_lm.decoder.bias"] = ("cls.predictions.bias",)
    if not config.tie_word_embeddings:
        names["masked_lm.decoder.weight"] = ("cls.predictions.decoder.weight",)
    return names


def is_huggingface_bert(config: BertConfig) -> bool:
    """Whether `transformers` has this architecture under the name BERT."""
    published = BertConfig()
    own = (
        "position_embedding", "segment_padding_index", "embedding_norm", "normalization",
        "norm_position", "gated_feed_forward", "linear_bias", "norm_bias", "decoder_bias",
        "pooler_activation", "mlm_head", "local_attention_window",
    )  # fmt: skip
    return config.type_vocab_size > 0 and all(
        getattr(config, name) == getattr(published, name) for name in own
    )


def to_huggingface(state_dict: StateDict, config: BertConfig) -> StateDict:
    """Our weights under the names of `transformers`, without the vocabulary's padding. Raises ModelError."""
    names = huggingface_names(config)
    result: StateDict = {}
    for name, tensor in without_padding(state_dict, config).items():
        if name not in names:
            raise ModelError(f"{name}: this parameter has no counterpart in transformers' BERT")
        result.update(zip(names[name], tensor.chunk(len(names[name])), strict=True))
    return result


def from_huggingface(state_dict: StateDict, config: BertConfig) -> StateDict:
    """The inverse of `to_huggingface`; also takes the old names gamma and beta. Raises ModelError for
    strangers.
    """
    theirs = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in state_dict.items()
    }
    if not any(name.startswith(("bert.", "cls.")) for name in theirs):
        theirs = {f"bert.{name}": tensor for name, tensor in theirs.items()}
    result: StateDict = {}
    for ours, parts in huggingface_names(config).items():
        if parts[0] in theirs:
            missing = [part for part in parts if part not in theirs]
            if missing:
                raise ModelError(f"{missing[0]}: not found beside {parts[0]}; the checkpoint is damaged")
            result[ours] = torch.cat([theirs.pop(part) for part in parts])
    for name, only_if_tied in _REPEATED.items():
        if config.tie_word_embeddings or not only_if_tied:
            theirs.pop(name, None)
    if theirs:
        raise ModelError(
            f"{sorted(theirs)[0]} and {len(theirs) - 1} more: found in the checkpoint, not part of BERT"
        )
    return with_padding(result, config)


def _vocabulary_names(config: BertConfig) -> tuple[str, ...]:
    return ("bert.embeddings.word.weight", "masked_lm.decoder.weight", "masked_lm.decoder.bias")


def without_padding(state_dict: StateDict, config: BertConfig) -> StateDict:
    """Each parameter once (a tied decoder is left out), the vocabulary's matrices cut to vocab_size rows."""
    result = dict(state_dict)
    if config.tie_word_embeddings and "bert.embeddings.word.weight" in result:
        result.pop("masked_lm.decoder.weight", None)
    for name in _vocabulary_names(config):
        if name in result:
            result[name] = result[name][: config.vocab_size]
    return result


def with_padding(state_dict: StateDict, config: BertConfig) -> StateDict:
    """The inverse of `without_padding`: rows of zeros up to padded_vocab_size, and the tied decoder again."""
    result = dict(state_dict)
    for name in _vocabulary_names(config):
        if name in result:
            missing = config.padded_vocab_size - len(result[name])
            padding = result[name].new_zeros(missing, *result[name].shape[1:])
            result[name] = torch.cat((result[name], padding))
    if config.tie_word_embeddings and any(name.startswith("masked_lm.") for name in result):
        result["masked_lm.decoder.weight"] = result["bert.embeddings.word.weight"]
    return result


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "silu": "silu",
}  # ours -> theirs
_SHARED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "layer_norm_eps", "initializer_range", "pad_token_id", "tie_word_embeddings",
    "is_decoder", "add_cross_attention",
)  # fmt: skip


def config_to_huggingface(config: BertConfig, architecture: str, dtype: torch.dtype) -> dict:
    """The content of config.json: of `transformers`' BERT, or of our own format."""
    if not is_huggingface_bert(config):
        return {"model_type": OWN_MODEL_TYPE, "architectures": [architecture]} | dataclasses.asdict(config)
    return {
        "model_type": "bert",
        "architectures": [architecture],
        "hidden_act": _ACTIVATIONS[config.hidden_act],
        "dtype": str(dtype).removeprefix("torch."),
    } | {name: getattr(config, name) for name in _SHARED_FIELDS}


def config_from_huggingface(values: dict) -> BertConfig:
    """BertConfig of the content of a config.json. Raises ModelError for architectures that we do not have."""
    kind = values.get("model_type")
    if kind == OWN_MODEL_TYPE:
        known = {field.name for field in dataclasses.fields(BertConfig)}
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    if kind != "bert":
        raise ModelError(f"config.json: found model_type {kind!r}, expected bert or {OWN_MODEL_TYPE}")
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(
            f"config.json: found position_embedding_type {values['position_embedding_type']!r}, "
            "expected absolute"
        )
    ours = {theirs: name for name, theirs in _ACTIVATIONS.items()} | {
        "gelu_new": "gelu_tanh",
        "swish": "silu",
    }
    activation = values.get("hidden_act", "gelu")
    if activation not in ours:
        raise ModelError(f"config.json: found hidden_act {activation!r}, expected one of {', '.join(ours)}")
    fields = {name: values[name] for name in _SHARED_FIELDS if name in values}
    return BertConfig(hidden_act=ours[activation], **fields)


def architecture_of(state_dict: StateDict) -> str:
    """The class that these weights belong to, told by the heads among them."""
    heads = {name.split(".")[0] for name in state_dict}
    if {"masked_lm", "next_sentence"} <= heads:
        return "BertForPreTraining"
    if "masked_lm" in heads:
        return "BertForMaskedLM"
    return "BertForNextSentencePrediction" if "next_sentence" in heads else "BertModel"


def save_pretrained(
    folder: str | os.PathLike, config: BertConfig, state_dict: StateDict,
    tokenizer_folder: str | os.PathLike | None = None,
) -> None:  # fmt: skip
    """Write config.json, model.safetensors and copies of the tokenizer's files into `folder`.

    `state_dict`: of one of our models, on any device; what is published is the logical vocabulary, tied
    weights once. `transformers` loads the folder with no missing and no unexpected key. Files appear whole or
    not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    convert = to_huggingface if is_huggingface_bert(config) else without_padding
    weights = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in convert(state_dict, config).items()
    }
    dtype = weights["bert.embeddings.word_embeddings.weight" if convert is to_huggingface else
                    "bert.embeddings.word.weight"].dtype  # fmt: skip
    values = config_to_huggingface(config, architecture_of(state_dict), dtype)
    if tokenizer_folder is not None:
        found = [name for name in TOKENIZER_FILES if (Path(tokenizer_folder) / name).is_file()]
        if not found:
            raise ModelError(
                f"{tokenizer_folder}: found none of {', '.join(TOKENIZER_FILES)}; give a tokenizer folder"
            )
        for name in found:
            shutil.copyfile(Path(tokenizer_folder) / name, folder / name)
    aside = folder / "model.safetensors.tmp"
    save_file(weights, aside, metadata={"format": "pt"})  # the key that transformers looks for
    os.replace(aside, folder / "model.safetensors")
    aside = folder / "config.json.tmp"
    aside.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(aside, folder / "config.json")


def load_pretrained(folder: str | os.PathLike) -> tuple[BertConfig, StateDict]:
    """Configuration and weights, under our names, of a folder in Hugging Face's or in our own format.

    Reads model.safetensors, or an old pytorch_model.bin with weights_only. Raises ModelError for what is
    missing, damaged or of another architecture.
    """
    folder = Path(folder)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder / 'config.json'}: {error}; expected a model folder, as cloze export makes"
        ) from None
    config = config_from_huggingface(values)
    weights = _read_weights(folder)
    if values.get("model_type") == OWN_MODEL_TYPE:
        return config, with_padding(weights, config)
    return config, from_huggingface(weights, config)


def _read_weights(folder: Path) -> StateDict:
    try:
        if (folder / "model.safetensors").is_file():
            return load_file(folder / "model.safetensors")
        if (folder / "pytorch_model.bin").is_file():
            return torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, EOFError) as error:
        raise ModelError(f"{folder}: the weights cannot be read: {error}") from None
    except Exception as error:  # UnpicklingError: weights_only refused something, or the file is no pickle
        if type(error).__name__ != "UnpicklingError":
            raise
        raise ModelError(
            f"{folder / 'pytorch_model.bin'}: refused, it holds more than weights or is damaged"
        ) from None
    raise ModelError(f"{folder}: found neither model.safetensors nor pytorch_model.bin")
