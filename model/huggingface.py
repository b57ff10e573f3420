"""Models in folders as Hugging Face has them: names of weights, config.json, model.safetensors, the tokenizer's files.

Architectures of `transformers` are written in its format, as their family (`families/`) says. Other variants are
written in our own format: the fields of BertConfig, and our names of weights. `load_pretrained` reads both; `InFolders`
makes models of them.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from cloze.model.config import BertConfig, ModelError
from cloze.model.config_files import (
    FINGERPRINT,
    OWN_MODEL_TYPE,
    SEGMENTS,
    SLOW_TOKENIZER_FILES,
    TOKENIZER_FILES,
    config_from_huggingface,
    copy_tokenizer_file,
    read_object,
    read_shape,
    reading,
    shape_of,
)
from cloze.model.families import BY_TYPE, FAMILIES, OUR_CLASSES, family_for, family_of
from cloze.model.families.family import HEADS, Family, Json
from cloze.model.initialization import init_weights
from cloze.model.problems import PROBLEMS, HeadConfig
from cloze.model.weight_files import INDEX, WEIGHTS, name_of, read_weights, shard_names
from cloze.model.weight_names import (
    POOLER,
    StateDict,
    architecture_of,
    from_huggingface,
    to_huggingface,
    with_padding,
    without_padding,
)

_Model = TypeVar("_Model", bound="InFolders")


# File names that mark a folder of another kind, into which no model may be written.
_NO_MODELS = {"manifest.json": "prepared data", "checkpoints": "a run"}


def config_to_huggingface(
    config: BertConfig,
    architecture: str,
    dtype: torch.dtype,
    head: HeadConfig | None = None,
    origin: Json | None = None,
) -> Json:
    """The content of config.json: of the family in `transformers`, or of our own format.

    Args:
        origin: that of the folder that the model began as. Of the same family, it is kept but for what has changed.
    """
    name = _their_class(config, architecture, head)
    if name is None:
        values = {"model_type": OWN_MODEL_TYPE, "architectures": [architecture], **dataclasses.asdict(config)}
        return values if head is None else values | {"head": dataclasses.asdict(head)}
    kind, numbers = family_of(config), name_of(dtype)
    values, named = _fields(config, head), {"model_type": kind, "dtype": numbers, "architectures": [name]}
    if origin is None or origin.get("model_type") != kind:
        return named | values
    before = _fields(shape_of(origin), _head_before(origin, name) if head else None)
    kept = {name: value for name, value in origin.items() if not (_is_note(name) or name in before.keys() - values)}
    if origin.get("torch_dtype") == numbers:  # its name before transformers 4.56
        del named["dtype"]
    else:
        kept.pop("torch_dtype", None)
    changed = {name: value for name, value in values.items() if name not in before or before[name] != value}
    for alias, (field, _) in family_for(config).aliases.items():
        if field in changed:
            kept.pop(alias, None)
    return kept | named | changed


def _fields(config: BertConfig, head: HeadConfig | None) -> Json:
    """The fields of config.json that say a shape and a head, in the shape's family."""
    family = family_for(config)
    values = family.write(config)
    if family.segment_weight and not config.type_vocab_size:
        values |= {"type_vocab_size": 1, SEGMENTS: False}
    if head is not None:
        values["id2label"] = {str(number): label for number, label in enumerate(head.labels)}
        values["label2id"] = {label: number for number, label in enumerate(head.labels)}
        values["problem_type"] = PROBLEMS[head.problem].problem_type
        values |= family.head_fields(head.pooling)
    return values


def _head_before(origin: Json, name: str) -> HeadConfig | None:
    """The head that a config.json of the same class says, or leaves out as the default one; None: another class."""
    return (_head(origin) or HeadConfig()) if origin.get("architectures") == [name] else None


def _is_note(name: str) -> bool:
    """Whether a field of config.json is a note of Cloze on how a model was trained, which the next training renews."""
    return name == FINGERPRINT or name.startswith(f"{OWN_MODEL_TYPE}_")


def _their_class(config: BertConfig, architecture: str, head: HeadConfig | None) -> str | None:
    """The name of the class in transformers that has this architecture and head; None: our own format."""
    if head and (head.layers != "last" or head.pieces != "none" or not PROBLEMS[head.problem].in_transformers):
        return None
    family = family_of(config)
    return BY_TYPE[family].class_of(config, architecture, head.pooling if head else None) if family else None


def save_pretrained(
    folder: str | os.PathLike[str],
    config: BertConfig,
    state_dict: StateDict,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    *,
    architecture: str | None = None,
    head: HeadConfig | None = None,
    notes: Json | None = None,
    origin: Json | None = None,
) -> None:
    """Write config.json, model.safetensors and copies of the tokenizer's files into `folder`.

    `transformers` loads the folder with no missing and no unexpected key, if it has the architecture; variants it lacks
    are written in our own format. Files appear whole or not at all.

    Args:
        state_dict: that of one of our models, on any device; written without the vocabulary's padding, tied weights
            once.
        architecture: the name of the model's class, needed for classifiers, whose labels `head` holds.
        notes: further entries of config.json.
        origin: the content of config.json that the model began with: of the same family, fields that say nothing of
            the shape are kept.

    Raises:
        ModelError: without a tokenizer in `tokenizer_folder`, and where `folder` holds prepared data or a run.
    """
    folder = Path(folder)
    for name, what in _NO_MODELS.items():
        if (folder / name).exists():
            raise ModelError(
                f"{folder}: found {what} ({name}), expected a new folder, or a model's to write over; choose another"
            )
    architecture = architecture or architecture_of(state_dict)
    if HEADS.get(architecture) != "masked_lm":  # what is left of the model has nothing to shift
        config = dataclasses.replace(config, shifted_predictions=False)
    if not any(name.startswith("bert.") for name in state_dict):
        state_dict = {f"bert.{name}": tensor for name, tensor in state_dict.items()}
    own = _their_class(config, architecture, head) is None
    weights = without_padding(state_dict, config) if own else to_huggingface(state_dict, config, architecture)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    dtype = state_dict["bert.embeddings.word.weight"].dtype
    values = config_to_huggingface(config, architecture, dtype, head, origin) | (notes or {})
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_folder is not None:
        _copy_tokenizer(Path(tokenizer_folder), folder, config)
    _write_weights(weights, folder)
    _write_config(values, folder)


def copy_pretrained(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[str]:
    """Copy a model folder that `load_pretrained` reads into a new one: its configuration, weights and tokenizer, shards
    and old pickled weights as one model.safetensors.

    Returns:
        The names of other files, which are not copied.

    Raises:
        ModelError: as `load_pretrained`, and for a link that leads out of the folder.
    """
    source, folder = Path(source), Path(folder)
    config, _ = load_pretrained(source)
    shards = () if (source / WEIGHTS).is_file() or not (source / INDEX).is_file() else (INDEX, *shard_names(source))
    named = ("config.json", WEIGHTS, *shards, *TOKENIZER_FILES, *SLOW_TOKENIZER_FILES)
    there = [name for name in named if os.path.lexists(source / name)]
    taken = [name for name in there if (source / name).is_file()]
    if taken != there:  # as a link to a file that is gone: without it texts may be read in another way
        lost = next(name for name in there if name not in taken)
        raise ModelError(f"{source / lost}: found no regular file, expected one; restore or remove it")
    place = source.resolve()
    inside = [place]
    if place.parent.name == "snapshots":  # the hub library's layout: folders of links to files beside them
        inside.append(place.parent.parent / "blobs")
    for name in taken:
        if not any((place / name).resolve().is_relative_to(each) for each in inside):
            raise ModelError(
                f"{source / name}: found a link out of the model's folder, to {(place / name).resolve()}, "
                "expected a file of the model; put the file in its place"
            )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "config.json", folder / "config.json")
    if WEIGHTS in taken:
        shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
    else:
        weights = {name: tensor.contiguous().clone() for name, tensor in read_weights(source).items()}
        _write_weights(weights, folder)
    _copy_tokenizer(source, folder, config)
    return sorted(path.name for path in source.iterdir() if path.name not in taken)


def cast_pretrained(folder: str | os.PathLike[str], dtype: torch.dtype) -> None:
    """Convert the weights of a model folder to another dtype.

    Raises:
        ModelError: for one that cannot represent them.
    """
    folder = Path(folder)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in read_weights(folder).items()
    }
    check_finite(weights, f"{folder} in {name_of(dtype)}")
    values = read_object(folder / "config.json") | {"dtype": name_of(dtype)}
    _write_weights(weights, folder)
    _write_config(values, folder)


def _write_config(values: Json, folder: Path) -> None:
    aside = folder / "config.json.tmp"
    aside.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(aside, folder / "config.json")


def _write_weights(weights: StateDict, folder: Path) -> None:
    aside = folder / f"{WEIGHTS}.tmp"
    aside.touch()
    mode = aside.stat().st_mode
    try:
        save_file(weights, aside, metadata={"format": "pt"})  # the key that transformers looks for
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):  # a full disk, which is no OSError there
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(aside)) from error
        raise
    aside.chmod(mode)  # permissions by the umask: the library always uses 0600
    os.replace(aside, folder / WEIGHTS)


def _copy_tokenizer(source: Path, folder: Path, config: BertConfig) -> None:
    """Copy the tokenizer's files. Unless they are from the folder of a model with as many positions and segments, they
    are adapted to this one for transformers: maximum length as positions, and segment ids only if the model has
    segments (transformers' classes before 5.0 refuse them otherwise).
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ModelError(f"{source}: found none of {', '.join(TOKENIZER_FILES)}, expected a tokenizer; name its folder")
    found += [name for name in SLOW_TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        if not (folder / name).exists() or not (folder / name).samefile(source / name):
            copy_tokenizer_file(source / name, folder / name)
    path = folder / "tokenizer_config.json"
    if path.exists() and not _is_of_like(source, config):
        values = read_object(path)
        segments = ["token_type_ids"] * (config.type_vocab_size > 1)
        values["model_input_names"] = ["input_ids", *segments, "attention_mask"]
        longest = values.get("model_max_length")
        if not isinstance(longest, int | float) or isinstance(longest, bool) or longest <= 0:
            longest = math.inf
        values["model_max_length"] = min(longest, config.max_position_embeddings)
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_of_like(folder: Path, config: BertConfig) -> bool:
    """Whether a folder is that of a model with as many positions and segments."""
    try:
        shape = read_shape(folder)
    except ModelError:
        return False
    return (shape.max_position_embeddings, shape.type_vocab_size > 1) == (
        config.max_position_embeddings,
        config.type_vocab_size > 1,
    )


def load_pretrained(folder: str | os.PathLike[str]) -> tuple[BertConfig, StateDict]:
    """Configuration and weights, under our names, of a folder in Hugging Face's or in our own format.

    Reads model.safetensors, the shards that model.safetensors.index.json names, or an old pytorch_model.bin with
    weights_only.

    Raises:
        ModelError: for what is missing, damaged, not finite or of another architecture.
    """
    folder = Path(folder)
    values = read_object(folder / "config.json")
    with reading(folder):
        config = config_from_huggingface(values)
    weights = read_weights(folder)
    if values["model_type"] != OWN_MODEL_TYPE:
        _check_family(weights, BY_TYPE[values["model_type"]], folder)
    _check_layers(weights, config, folder)
    check_finite(weights, str(folder))
    if values["model_type"] == OWN_MODEL_TYPE:
        return config, with_padding(weights, config)
    weights = from_huggingface(weights, config, _named_architecture(values) or "")
    segments = "bert.embeddings.segment.weight"
    # Training in transformers changes the zeros, which makes it a normal segment.
    if values.get(SEGMENTS) is False and segments in weights and not weights[segments].any():
        config = dataclasses.replace(config, type_vocab_size=0)
        del weights[segments]
    return config, weights


def _check_family(weights: StateDict, family: Family, folder: Path) -> None:
    """Check that the weights have no names of another family than config.json's."""
    if any(name.startswith(family.prefix) for name in weights):
        return
    others = [each for each in FAMILIES if any(name.startswith(each.prefix) for name in weights)]
    if kinds := [kind for other in others for kind in other.class_prefixes]:
        raise ModelError(
            f"{folder}: found weights of {', '.join(kinds)}, expected those of {', '.join(family.class_prefixes)}, as "
            "config.json says; fetch the model again"
        )


def _check_layers(weights: StateDict, config: BertConfig, folder: Path) -> None:
    """Check the number of layers in config.json before anything is allocated for each, since it may be any number."""
    family = family_of(config)
    stem = BY_TYPE[family].layers.removeprefix(BY_TYPE[family].prefix) if family else ""
    stems = (re.escape(each).replace(r"\{\}", r"(\d+)") for each in ("encoder.layers.{}.", stem) if each)
    pattern = re.compile("|".join(rf"(?:^|\.){each}" for each in stems))
    numbers = {match[match.lastindex or 1] for match in map(pattern.search, weights) if match}
    if config.num_distinct_layers > len(numbers):
        field = "num_hidden_layers" if config.num_layer_groups is None else "num_layer_groups"
        name = BY_TYPE[family].fields.get(field, field) if family else field
        raise ModelError(
            f"{folder / 'config.json'}: found {name} {config.num_distinct_layers}, expected "
            f"{len(numbers)}, the layers among the weights; fix it, or fetch the model again"
        )


def check_sizes(config: BertConfig, weights: StateDict, source: str) -> None:
    """Check that the sizes in config.json are those of the weights, before a model of that size is made. (A model on
    the meta device would have all shapes, but imports torch's compiler, which takes seconds.)
    """
    width, halves = config.embedding_width, 2 if config.gated_feed_forward else 1
    sizes = {
        "bert.embeddings.word.weight": (config.padded_vocab_size, width),
        "bert.encoder.layers.0.feed_forward.up.weight": (config.intermediate_size * halves, config.hidden_size),
    }
    if config.position_embedding == "learned":
        sizes["bert.embeddings.position.weight"] = (config.num_position_rows, width)
    if config.relative_terms:
        sizes["bert.relative.table.weight"] = (2 * config.relative_span, config.hidden_size)
    if config.type_vocab_size:
        sizes["bert.embeddings.segment.weight"] = (config.type_vocab_size, width)
    for name, size in sizes.items():
        if name not in weights or tuple(weights[name].shape) != size:
            raise ModelError(f"{source}: found {_found(name, weights)}, expected shape {size}; fetch the model again")


def _found(name: str, weights: StateDict) -> str:
    """What there is of a parameter, for messages."""
    return f"{name} of shape {tuple(weights[name].shape)}" if name in weights else f"no {name}"


def check_finite(weights: StateDict, source: str) -> None:
    """Raise ModelError for weights with NaN or infinity."""
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # A tensor with NaN has NaN as minimum and maximum, so one pass is enough, of 16 and 32 bits without a copy. The
        # model may be in 32 bits, in which a number of 64 may be infinite.
        numbers = tensor if tensor.element_size() in (2, 4) else tensor.float()
        if not torch.stack(numbers.aminmax()).isfinite().all():
            raise ModelError(
                f"{source}: found {name} with numbers that are not finite, expected a model whose "
                "training went well; take an earlier checkpoint, or fetch the model again"
            )


def load_architecture(folder: str | os.PathLike[str]) -> str:
    """Name of the class of a model folder by its config.json.

    Raises:
        ModelError: it names none.
    """
    name = _named_architecture(read_object(Path(folder) / "config.json"))
    if not name:
        raise ModelError(
            f"{folder}: found no architectures in config.json, expected the name of the model's class, "
            "such as BertForMaskedLM; add it"
        )
    return OUR_CLASSES.get(name, name)


def _named_architecture(values: Json) -> str | None:
    names = values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def load_note(folder: str | os.PathLike[str], name: str) -> Any:
    """The note of this name that was given to `save_pretrained`; None if config.json has none."""
    return read_object(Path(folder) / "config.json").get(name)


def load_head(folder: str | os.PathLike[str]) -> HeadConfig | None:
    """Labels and problem type of the head in a model folder; None if config.json has none."""
    with reading(Path(folder)):
        return _head(read_object(Path(folder) / "config.json"))


def _head(values: Json) -> HeadConfig | None:
    if values.get("head"):
        head = values["head"]
        columns = tuple((name, tuple(classes)) for name, classes in head["columns"])
        return HeadConfig(**head | {"labels": tuple(head["labels"]), "columns": columns})
    family = BY_TYPE.get(values["model_type"])
    pooling: Any = family.pooling(values) if family else "pooler"
    labels = HeadConfig.labels  # transformers leaves out default ones
    if "id2label" in values:
        labels = _labels(values["id2label"])
        if values.get("num_labels") not in (None, len(labels)):
            raise ModelError(
                f"config.json: found num_labels {str(values['num_labels'])[:40]} with {len(labels)} labels in "
                "id2label, expected as many; fix it, or leave it out"
            )
        _check_numbers_of(labels, values.get("label2id"))
    elif pooling == "pooler" and not values.get("problem_type"):
        return None
    problems = {
        each.problem_type: name for name, each in PROBLEMS.items() if each.in_transformers and each.problem_type
    }
    given = values.get("problem_type")
    if given is not None and given not in problems:
        raise ModelError(f"config.json: found problem_type {given!r}, expected one of {', '.join(problems)}, or none")
    problem = "single_label" if given is None else problems[given]
    if len(labels) == 1 and problem == "single_label":
        problem = "score"
    return HeadConfig(labels, problem, pooling=pooling)


def _labels(given: Any) -> tuple[str, ...]:
    """Names of the labels by number, of id2label in config.json."""
    known = isinstance(given, dict) and set(given) == {str(number) for number in range(len(given))} and given
    if not known or not all(isinstance(label, str | int) and not isinstance(label, bool) for label in given.values()):
        raise ModelError(
            f"config.json: found id2label {str(given)[:60]}, expected an object of names by number, from 0 on without "
            "a gap; fix it, or leave it out where the model has no labels"
        )
    return tuple(str(given[str(number)]) for number in range(len(given)))


def _check_numbers_of(labels: tuple[str, ...], given: Any) -> None:
    """Raise ModelError if label2id gives the same names other numbers than id2label: one of them is of other rows of
    the head. Folders whose label2id has other names are many, and mean no harm: transformers' default ones, say.
    """
    if not isinstance(given, dict) or given.keys() != set(labels) or len(given) < len(labels):
        return
    for number, label in enumerate(labels):
        if str(given[label]) != str(number):
            raise ModelError(
                f"config.json: found {label[:60]!r} as {number} in id2label and as {str(given[label])[:20]} "
                "in label2id, expected the same number; fix the one that is not that of its row in the head"
            )


class InFolders(nn.Module):
    """Mixin with which a model class is loaded from folders and its objects are saved to them."""

    config: BertConfig
    origin: Json | None = None
    """After from_folder: the content of its config.json."""

    takes_head = False
    """Whether the constructor takes a `head`."""
    new_parameters: tuple[str, ...] = ()
    """After from_folder: the parameters of a head that the folder did not hold and that were drawn."""

    @classmethod
    def from_folder(
        cls: type[_Model],
        folder: str | os.PathLike[str],
        *,
        head: HeadConfig | None = None,
        new_head_seed: int | None = None,
        **options: Any,
    ) -> _Model:
        """The model in `folder`, in evaluation mode; heads of the folder that this class lacks are left out.

        Args:
            head: labels of a new classifier; None takes the folder's.
            new_head_seed: draws a head that the folder lacks (or that has other labels); without a seed that raises
                ModelError, but a BertModel that was saved without its pooler has none.
            options: of the constructor.
        """
        config, weights = load_pretrained(folder)
        pooled = any(name.startswith("bert.pooler.") for name in weights)
        values = read_object(Path(folder) / "config.json")
        named = _named_architecture(values)
        bare = OUR_CLASSES.get(named or "", named) == "BertModel"
        if new_head_seed is None and not pooled and bare:
            config = dataclasses.replace(config, pooler=False)  # transformers' config.json lacks it
        if cls.takes_head:
            options["head"] = head or load_head(folder)
        model = cls.from_weights(config, weights, str(folder), new_head_seed=new_head_seed, **options)
        model.origin = values
        return model

    @classmethod
    def from_weights(
        cls: type[_Model],
        config: BertConfig,
        weights: StateDict,
        source: str,
        *,
        new_head_seed: int | None = None,
        **options: object,
    ) -> _Model:
        """The same from weights under our names; `source` names them in errors."""
        if config.classifier_transform and config.mlm_head == "bert":
            # ModernBERT has one head of these names: a classifier starts with that of the masked LM.
            learned = {
                name.replace("masked_lm.", "transform."): tensor
                for name, tensor in weights.items()
                if name.startswith(("masked_lm.dense.", "masked_lm.norm."))
            }
            weights = learned | weights
        check_sizes(config, weights, source)
        model = cls(config, **options)
        prefix = "" if hasattr(model, "bert") else "bert."
        wanted = {prefix + name: tensor.shape for name, tensor in model.state_dict().items()}
        fitting = {name: weights[name] for name in wanted if name in weights and weights[name].shape == wanted[name]}
        lacking = tuple(name for name in wanted if name not in fitting)
        broken = [name for name in lacking if name.startswith("bert.") and ".pooler." not in name]
        if broken:
            size = tuple(wanted[broken[0]])
            raise ModelError(
                f"{source}: found {_found(broken[0], weights)}, expected shape {size}; fetch the model again"
            )
        if extra := [name for name in weights.keys() - wanted.keys() - POOLER if name.startswith("bert.")]:
            raise ModelError(
                f"{source}: found {min(extra)}, which a model of this config.json lacks ({len(extra)} such names), "
                "expected those of its encoder; fix config.json, or fetch the model again"
            )
        if lacking:
            if new_head_seed is None:
                raise ModelError(
                    f"{source}: found {_found(lacking[0], weights)}, expected a {cls.__name__} with shape "
                    f"{tuple(wanted[lacking[0]])} there; train one with `cloze finetune` (in Python new_head_seed of "
                    "from_folder draws a random one)"
                )
            init_weights(model, new_head_seed)
        stripped = {name.removeprefix(prefix): tensor for name, tensor in fitting.items()}
        model.load_state_dict(stripped, strict=False)  # every name was accounted for above
        model.new_parameters = tuple(name.removeprefix(prefix) for name in lacking)
        return model.eval()

    def save(self, folder: str | os.PathLike[str], tokenizer_folder: str | os.PathLike[str] | None = None) -> None:
        """Write the model as `save_pretrained` does."""
        head, name = getattr(self, "head", None), type(self).__name__
        save_pretrained(
            folder,
            self.config,
            self.state_dict(),
            tokenizer_folder,
            architecture=name,
            head=head,
            origin=self.origin,
        )
