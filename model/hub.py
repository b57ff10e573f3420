"""Model folders in and out: config.json, model.safetensors and the tokenizer's files.

What `transformers` has an architecture for (BERT, ModernBERT) is written for `transformers`. Other variants
are written in our own format: the fields of BertConfig, and our own names of weights. `load_pretrained` reads
both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model.config import BertConfig, HeadConfig, ModelError
from model.names import StateDict, family_of, from_huggingface, to_huggingface, with_padding, without_padding

OWN_MODEL_TYPE = "cloze"  # model_type in config.json of our own format
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}
_THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh"}
_PROBLEMS = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
_SEGMENTS = "segment_embeddings"  # false in config.json: the one segment is of zeros, and stands for none
# Fields that BERT's configuration in transformers has under the same name.
_BERT_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "layer_norm_eps", "initializer_range", "pad_token_id", "tie_word_embeddings",
    "is_decoder", "add_cross_attention",
)
_MODERN_FIELDS = {  # ours -> ModernBERT's
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings", "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_eps", "initializer_range": "initializer_range", "pad_token_id": "pad_token_id",
    "tie_word_embeddings": "tie_word_embeddings", "local_attention_window": "local_attention",
    "norm_bias": "norm_bias", "decoder_bias": "decoder_bias",
}


def config_to_huggingface(
    config: BertConfig, architecture: str, dtype: torch.dtype, head: HeadConfig | None = None
) -> dict:
    """The content of config.json: of `transformers`' BERT or ModernBERT, or of our own format."""
    family, rate = _export_family(config, architecture, head), config.classifier_dropout
    if family is None:
        values = {"model_type": OWN_MODEL_TYPE, "architectures": [architecture], **dataclasses.asdict(config)}
        return values if head is None else values | {"head": dataclasses.asdict(head)}
    values = {"model_type": family, "dtype": str(dtype).removeprefix("torch.")}
    if family == "bert":
        values |= {"architectures": [architecture], "hidden_act": _ACTIVATIONS[config.hidden_act]}
        values |= {name: getattr(config, name) for name in _BERT_FIELDS}
        if not config.type_vocab_size:  # which BERT there is never without
            values |= {"type_vocab_size": 1, _SEGMENTS: False}
    else:
        theirs = architecture.replace("BertForPreTraining", "BertForMaskedLM")  # there are no pairs
        values |= {"architectures": [f"Modern{theirs}"]}
        values |= {theirs: getattr(config, ours) for ours, theirs in _MODERN_FIELDS.items()}
        values |= {
            "hidden_activation": _ACTIVATIONS[config.hidden_act],
            "classifier_activation": _ACTIVATIONS[config.hidden_act],
            **dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), config.linear_bias),
            **dict.fromkeys(("embedding_dropout", "mlp_dropout"), config.hidden_dropout_prob),
            "classifier_dropout": config.hidden_dropout_prob if rate is None else rate,
            # The tokenizer's affair; ModernBERT's own ids, which would be taken, are of another vocabulary.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
            "global_attn_every_n_layers": config.global_attention_every,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": config.rotary_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rotary_theta},
            },
        }
    if head is not None:
        values["id2label"] = {str(number): label for number, label in enumerate(head.labels)}
        values["label2id"] = {label: number for number, label in enumerate(head.labels)}
        values["problem_type"] = _PROBLEMS.get(head.problem)  # of a score it says nothing
        if family == "modernbert":
            values["classifier_pooling"] = "mean" if head.pooling == "mean" else "cls"
    return values


def _export_family(config: BertConfig, architecture: str, head: HeadConfig | None) -> str | None:
    """The family in transformers that has this architecture and head; None: our own format."""
    family = family_of(config)
    if head and (head.layers != "last" or head.pieces != "none"):
        return None
    if family == "modernbert":
        if architecture in ("BertModel", "BertForMaskedLM", "BertForPreTraining"):
            return family
        known = config.classifier_transform and architecture != "BertForNextSentencePrediction"
        return family if known and not (head and (head.columns or head.pooling == "max")) else None
    needs_pooler = architecture in ("BertForPreTraining", "BertForNextSentencePrediction",
                                    "BertForSequenceClassification", "BertForMultipleChoice")
    if (needs_pooler and not config.pooler) or (head and (head.columns or head.pooling != "pooler")):
        return None
    return family


def config_from_huggingface(values: dict) -> BertConfig:
    """BertConfig of the content of a config.json. Raises ModelError for architectures that we do not have."""
    kind = values.get("model_type")
    if kind == OWN_MODEL_TYPE:
        known = {field.name for field in dataclasses.fields(BertConfig)}
        return BertConfig(**{name: value for name, value in values.items() if name in known})
    if kind == "modernbert":
        return _modern_config(values)
    if kind != "bert":
        raise ModelError(f"config.json: found model_type {kind!r}, expected bert, modernbert or {OWN_MODEL_TYPE}")
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(
            f"config.json: found position_embedding_type {values['position_embedding_type']!r}, expected absolute"
        )
    fields = {name: values[name] for name in _BERT_FIELDS if name in values}
    fields["pad_token_id"] = fields.get("pad_token_id") or 0  # transformers may say null
    return BertConfig(hidden_act=_activation(values.get("hidden_act", "gelu")), **fields)


def _activation(name: str) -> str:
    if name not in _THEIR_ACTIVATIONS:
        raise ModelError(f"config.json: found activation {name!r}, expected one of {', '.join(_THEIR_ACTIVATIONS)}")
    return _THEIR_ACTIVATIONS[name]


def _modern_config(values: dict) -> BertConfig:
    fields = {ours: values[theirs] for ours, theirs in _MODERN_FIELDS.items() if theirs in values}
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


def _rotary_bases(values: dict) -> dict[str, float]:
    """Base of the frequencies by kind of layer; raises ModelError for frequencies that are scaled."""
    bases = {"full_attention": values.get("global_rope_theta", 160_000.0),
             "sliding_attention": values.get("local_rope_theta", 10_000.0)}
    for field in ("rope_scaling", "rope_parameters"):
        given = values.get(field) or {}
        layers = {layer: given.get(layer) or {} for layer in bases}
        for rope in (given, *layers.values()):
            kind = rope.get("rope_type") or rope.get("type") or "default"
            if kind != "default":
                raise ModelError(f"config.json: found rope_type {kind!r} in {field}, expected default: scaled rotary "
                                 "positions are not computed here; take a model without them")
        bases = {layer: layers[layer].get("rope_theta", base) for layer, base in bases.items()}
    return bases


def architecture_of(state_dict: StateDict) -> str:
    """The class that these weights belong to, told by the heads among them."""
    heads = {name.split(".")[0] for name in state_dict}
    if {"masked_lm", "next_sentence"} <= heads:
        return "BertForPreTraining"
    for head, architecture in (
        ("masked_lm", "BertForMaskedLM"),
        ("next_sentence", "BertForNextSentencePrediction"),
        ("span", "BertForQuestionAnswering"),
    ):
        if head in heads:
            return architecture
    if "classifier" in heads:
        raise ModelError("architecture: several classes have a classifier, expected its name; give architecture")
    return "BertModel"


def save_pretrained(
    folder: str | os.PathLike, config: BertConfig, state_dict: StateDict,
    tokenizer_folder: str | os.PathLike | None = None, *, architecture: str | None = None,
    head: HeadConfig | None = None, notes: dict[str, Any] | None = None,
) -> None:
    """Write config.json, model.safetensors and copies of the tokenizer's files into `folder`.

    `state_dict`: of one of our models, on any device; what is published is the logical vocabulary, tied
    weights once. `architecture`: the name of the model's class, needed for classifiers, whose labels `head`
    holds. `transformers` loads the folder with no missing and no unexpected key, if it has the architecture;
    variants it lacks are written in our own format. `notes`: further entries of config.json. Files appear whole
    or not at all. Raises ModelError without a tokenizer in `tokenizer_folder`.
    """
    folder = Path(folder)
    architecture = architecture or architecture_of(state_dict)
    if not any(name.startswith("bert.") for name in state_dict):
        state_dict = {f"bert.{name}": tensor for name, tensor in state_dict.items()}
    own = _export_family(config, architecture, head) is None
    weights = without_padding(state_dict, config) if own else to_huggingface(state_dict, config)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    dtype = state_dict["bert.embeddings.word.weight"].dtype
    values = config_to_huggingface(config, architecture, dtype, head) | (notes or {})
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_folder is not None:
        _copy_tokenizer(Path(tokenizer_folder), folder, segments=config.type_vocab_size > 1)
    aside = folder / "model.safetensors.tmp"
    save_file(weights, aside, metadata={"format": "pt"})  # the key that transformers looks for
    os.replace(aside, folder / "model.safetensors")
    aside = folder / "config.json.tmp"
    aside.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(aside, folder / "config.json")


def _copy_tokenizer(source: Path, folder: Path, segments: bool) -> None:
    """Copies of the tokenizer's files, which give the model `segments` if it has them; one that has none is not to be
    given any, which transformers' classes before 5.0 refuse.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ModelError(f"{source}: found none of {', '.join(TOKENIZER_FILES)}, expected a tokenizer; name its folder")
    for name in found:
        if not (folder / name).exists() or not (folder / name).samefile(source / name):
            shutil.copyfile(source / name, folder / name)
    path = folder / "tokenizer_config.json"
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        values["model_input_names"] = ["input_ids", *["token_type_ids"] * segments, "attention_mask"]
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_pretrained(folder: str | os.PathLike) -> tuple[BertConfig, StateDict]:
    """Configuration and weights, under our names, of a folder in Hugging Face's or in our own format.

    Reads model.safetensors, or an old pytorch_model.bin with weights_only. Raises ModelError for what is
    missing, damaged or of another architecture.
    """
    folder = Path(folder)
    values = _read_config(folder)
    config = config_from_huggingface(values)
    weights = _read_weights(folder)
    if values["model_type"] == OWN_MODEL_TYPE:
        return config, with_padding(weights, config)
    weights = from_huggingface(weights, config, (values.get("architectures") or [""])[0])
    segments = "bert.embeddings.segment.weight"
    # Training in transformers moves the zeros, and makes a segment of them as others are.
    if values.get(_SEGMENTS) is False and segments in weights and not weights[segments].any():
        config = dataclasses.replace(config, type_vocab_size=0)
        del weights[segments]
    return config, weights


def load_architecture(folder: str | os.PathLike) -> str:
    """Name of our class that a model folder was saved from, as config.json says. Raises ModelError if it names none."""
    values = _read_config(Path(folder))
    if not values.get("architectures"):
        raise ModelError(f"{folder}: found no architectures in config.json, expected the name of the model's class, "
                         "such as BertForMaskedLM; add it")
    return values["architectures"][0].removeprefix("Modern")


def load_note(folder: str | os.PathLike, name: str) -> Any:
    """What `save_pretrained` was given as a note of this name; None if config.json has none."""
    return _read_config(Path(folder)).get(name)


def load_head(folder: str | os.PathLike) -> HeadConfig | None:
    """Labels and kind of the classifier in a model folder; None if config.json says nothing of one."""
    values = _read_config(Path(folder))
    if values.get("head"):
        head = values["head"]
        columns = tuple((name, tuple(classes)) for name, classes in head["columns"])
        return HeadConfig(**head | {"labels": tuple(head["labels"]), "columns": columns})
    pooling = values.get("classifier_pooling", "cls") if values["model_type"] == "modernbert" else "pooler"
    labels = HeadConfig.labels  # transformers leaves out default ones
    if values.get("id2label"):
        labels = tuple(label for _, label in sorted(values["id2label"].items(), key=lambda item: int(item[0])))
    elif pooling == "pooler" and not values.get("problem_type"):
        return None
    problems = {theirs: ours for ours, theirs in _PROBLEMS.items()}
    problem = problems.get(values.get("problem_type"), "single_label")
    if len(labels) == 1 and problem == "single_label":
        problem = "score"
    return HeadConfig(labels, problem, pooling=pooling)


def _read_config(folder: Path) -> dict:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'}: {error}; expected a model folder, as cloze export makes") from None


def _read_weights(folder: Path) -> StateDict:
    path = folder / "model.safetensors"
    old = folder / "pytorch_model.bin"
    if not path.is_file() and not old.is_file():
        raise ModelError(f"{folder}: found neither model.safetensors nor pytorch_model.bin")
    try:
        return load_file(path) if path.is_file() else _read_old_weights(old)
    except (OSError, RuntimeError, SafetensorError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{folder}: the weights cannot be read ({reason}); fetch or export them again") from None


def _read_old_weights(path: Path) -> StateDict:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a file that is no archive of tensors makes of the reader
        raise ModelError(
            f"{path}: refused, it is damaged or holds more than weights ({type(error).__name__}); convert it to "
            "safetensors"
        ) from None
