"""The folder of a run: the names of its files, and what they say of it (configuration, data, device)."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import yaml

from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import publish_json, readable_errors, sha256_of
from cloze.pipeline.untrusted import (
    check_characters,
    check_readable,
    fields_if_readable,
    load_json,
    load_yaml,
    read_json,
    unique_fields,
)

CONFIG = "config.yaml"
DATA = "data.json"
RESULTS = "results.json"  # of a fine-tuning; in the folder of a sweep, of all its runs
MODEL_HASHES = "model_hashes"  # in it: of the files of the folder `model`
DEVICE = "device.json"  # what was chosen by the device at the first start
DEEPSPEED = "deepspeed.json"
# Versions of the newest start, the number of starts, which run this is, and the folders that go out with its model.
SOFTWARE = "software.json"
# The files of a run's description, that which marks its folder as a run last.
DESCRIPTION = (DATA, DEVICE, DEEPSPEED, SOFTWARE, CONFIG)
STATUS = "status.json"
PREDICTIONS = "predictions"  # of a fine-tuning run: the folder of what it predicts for the rows of its files
METRICS = "metrics.jsonl"
TRACKING = "trackers.json"  # state of the trackers, for resumes
TOKENIZER = "tokenizer"
# Of the model folder that the run began with: config.json, and the tokenizer's files if it is the same.
ORIGIN = "origin"
MODEL = "model"  # written by a complete fine-tuning run
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
HEARTBEATS = "heartbeats"
STARTS = "starts"  # in software.json
# In software.json, and in state.json of each checkpoint: the hash of the configuration with which the run was begun.
RUN = "run"
# In software.json: a hash of the weights that the run began with, if they are another's.
FIRST_WEIGHTS = "first_weights"
TRAINED_LENGTH = "max_length"  # in data.json
VALIDATION_HASH = "validation_hash"
SET_HASH = "validation_set_hash."  # and the name of a set that the run is measured on besides; it may change
POOLED_SETS = "validation_sets_pooled"  # of which its loss is the mean, since the data has no held-out samples
MODEL_HASH = "model_hash"
MANIFEST_HASH = "manifest_hash"  # of the data; in a mixture with a dot and the name of a source

Facts = Mapping[str, str | int]  # facts of the inputs of a run, by name: hashes, fingerprints, lengths


def flatten(values: Fields, prefix: str = "") -> dict[str, object]:
    """Nested fields by their dotted names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def step_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def heartbeat_name(rank: int) -> str:
    """Name of the file of a process in HEARTBEATS."""
    return f"rank-{rank:05d}.json"


def data_facts(manifest: Manifest) -> dict[str, str | int]:
    """Facts of the prepared data of a run: two hashes, and the maximum length."""
    return {
        MANIFEST_HASH: manifest.hash,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        TRAINED_LENGTH: manifest.max_length,
    }


def trained_length(folder: Path) -> int | None:
    """Length in tokens of the longest samples of a pretraining run; None if an earlier version wrote it.

    Raises:
        UserError: the file has a length that the model cannot have been trained on.
    """
    length = _number_in(folder / DATA, TRAINED_LENGTH)
    if length is not None and length > (most := model_config(folder).max_position_embeddings):
        raise UserError(
            f"{folder / DATA}: {TRAINED_LENGTH}: found {length!s:.60}, expected at most {most}, the model's positions; "
            "restore the file"
        )
    return length


def _number_in(path: Path, *names: str) -> int | None:
    """A whole number above 0 in a file of a run, by the names of its sections and its own; None: it has none.

    Raises:
        UserError: as `read_fields`, and for another value.
    """
    value: object = read_fields(path)
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise UserError(
        f"{path}: {'.'.join(names)}: found {value!r:.60}, expected a whole number above 0, as the run wrote it; "
        "restore the file"
    )


def read_fields(path: Path) -> Fields:
    """The fields in a file of a run: its configuration (YAML), or one of the JSON files.

    Raises:
        UserError: there is no such file, or it holds no fields.
    """
    expected = "expected the folder of a run of `cloze pretrain` or `cloze finetune`"
    try:
        with readable_errors(path):
            if not path.is_file():
                found = f"no {path.name} in the folder" if path.parent.is_dir() else "no folder"
                raise UserError(f"run: found {found} {path.parent}, {expected}{_if_lost(path)}")
            check_readable(path)
            text = path.read_text(encoding="utf-8")
            # JSON is not parsed as YAML, in which 1e-05 and NaN are strings.
            content = load_json(text, unique_fields) if path.suffix == ".json" else load_yaml(text, name=str(path))
            if path.suffix == ".json":
                check_characters(text, content)
    except UserError:  # also a ValueError, but with its own message
        raise
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise UserError(f"{path}: found what is no {kind}, {expected}{_if_lost(path)}") from error
    if not _is_fields(content):
        raise UserError(f"{path}: found no fields, expected those of a run{_if_lost(path)}")
    return content


def _if_lost(path: Path) -> str:
    """What to do about a file of the description that stood beside other files of a run."""
    lost = path.name in DESCRIPTION and (path.parent / STATUS).exists() and not (path.exists() and path.stat().st_size)
    return f"; it was removed or emptied: restore {path.name} from a copy, or give another --output" if lost else ""


def _is_fields(content: object) -> TypeGuard[Fields]:
    """Whether this is a dict whose names are texts, and those of dicts in it too."""
    return isinstance(content, dict) and all(
        isinstance(name, str) and (not isinstance(value, dict) or _is_fields(value)) for name, value in content.items()
    )


def model_config(folder: Path) -> BertConfig:
    """The model configuration of a run.

    Raises:
        UserError: the folder holds no run, or one of another version.
    """
    content = read_fields(folder / CONFIG)
    if "train_file" in content:
        raise UserError(
            f"{folder}: found a run of `cloze finetune` without its model, which is written at the end, "
            "expected a complete one; the command that started it resumes it"
        )
    try:
        return BertConfig(**content["model"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / CONFIG}: found no model that this version knows ({error}), expected the "
            "configuration of a run of `cloze pretrain`"
        ) from error


def fields_of(folder: Path) -> dict[str, object]:
    """The resolved configuration of a run, by dotted names.

    Raises:
        UserError: the folder holds none.
    """
    return flatten(read_fields(folder / CONFIG))


def is_pretraining(folder: Path) -> bool:
    """Whether the folder is a pretraining run: it has checkpoints and no finished model."""
    return (folder / CONFIG).exists() and not (folder / MODEL / "config.json").exists()


def model_folder(folder: Path) -> Path:
    """The Hugging Face folder inside a fine-tuning run, or else the folder itself."""
    return folder / MODEL if (folder / MODEL / "config.json").exists() else folder


def check_holds_model(folder: Path) -> None:
    """Raise UserError for a folder without a model: no such folder, a sweep, an incomplete run."""
    if is_pretraining(folder):
        model_config(folder)
    elif not (model_folder(folder) / "config.json").exists():
        found = "no model in the folder" if folder.is_dir() else "no folder"
        raise UserError(
            f"model: found {found} {folder}, expected a Cloze run or a Hugging Face folder; of a sweep "
            "give one of the runs in it, of an old sentence-transformers' model its 0_Transformer"
        )


def device_facts(folder: Path) -> dict[str, object]:
    """What was chosen by the device at the first start of the run; empty for a new run or one of an earlier version."""
    return read_fields(folder / DEVICE) if (folder / DEVICE).is_file() else {}


def keep_device_facts(folder: Path, facts: dict[str, object]) -> None:
    """Save what was chosen by the device, unless the run has begun."""
    if not (folder / DEVICE).is_file():
        publish_json(folder / DEVICE, facts)


def saved_micro_batch_size(folder: Path) -> int | None:
    """The micro-batch size of an earlier start of this run; None if there is none."""
    return _number_in(folder / CONFIG, "train", "micro_batch_size") if (folder / CONFIG).is_file() else None


def saved_data_streams(folder: Path, accept_changes: bool) -> int | None:
    """The number of data streams of an earlier start of this run; None if there is none.

    Raises:
        UserError: an earlier version began the run with an order of samples that this version lacks, and changes are
        not accepted.
    """
    if not (folder / CONFIG).is_file():
        return None
    streams = _number_in(folder / CONFIG, "data_streams")
    if streams is None and not accept_changes:
        raise UserError(
            f"output: found {folder}, a run begun by an earlier version of Cloze with another order of "
            "samples, expected one with data_streams; finish it with that version, choose another "
            "--output, or continue in the new order with --checkpoint.accept_changes true"
        )
    return streams


def has_checkpoints(folder: Path) -> bool:
    """Whether a run in a folder has checkpoints, good or damaged, from which a start goes on."""
    return any(path.suffix != ".tmp" for path in (folder / CHECKPOINTS).glob("step-*"))


def identity_of(folder: Path) -> str | None:
    """A hash of a run's configuration at its start and of its data, which tell it from another run; None: an earlier
    version began it.
    """
    path = folder / SOFTWARE
    run = read_fields(path).get(RUN) if path.is_file() else None
    if not isinstance(run, str | None):
        raise UserError(f"{path}: {RUN}: found {run!s:.60}, expected a text; restore the file")
    return run and hashlib.sha256(f"{run} {sha256_of(folder / DATA)}".encode()).hexdigest()


def num_starts(folder: Path) -> int:
    """How often the run has been started; 0 where it is not known, as for a run that an earlier version began."""
    try:
        count = read_json(folder / SOFTWARE).get(STARTS, 0)
        return count if type(count) is int else 0
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return 0


def check_own(folder: Path, checkpoint: Path, state: Fields) -> None:
    """Refuse a checkpoint of another run, which may have been copied into this one's folder, and a configuration of
    another one that lies there instead of its own.

    Args:
        folder: of the run; without a readable record there only the model's shape is compared.
        state: content of the checkpoint's state.json.

    Raises:
        UserError: it is another run's.
    """
    other = f"{checkpoint}: found a checkpoint of another run"
    advice = "move away the one of the two that is not this run's"
    expected = fields_if_readable(folder / SOFTWARE).get(RUN)
    if expected is not None and (found := state.get(RUN)) != expected:
        raise UserError(
            f"{other} ({RUN} is {found!s:.12} in its state.json), expected {expected!s:.12}, as in "
            f"{folder / SOFTWARE}; {advice}"
        )
    shape, saved = fields_of(folder), state.get("shaping", {})
    for name in sorted(shape.keys() & saved.keys()):
        if name.startswith("model.") and shape[name] != saved[name]:
            raise UserError(
                f"{other}, whose {name} is {saved[name]!r:.60}, expected {shape[name]!r:.60}, as in "
                f"{folder / CONFIG}; {advice}"
            )


def stem_of(split: str) -> str:
    """What the names of the files in PREDICTIONS begin with for a split of results.json."""
    return split.replace("/", "-")
