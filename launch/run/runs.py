"""The folder of a run: its configuration and data, its status, its lock."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from cloze.launch.config import FinetuneConfig, PretrainConfig, RunConfig, marks
from cloze.launch.config.marks import marked
from cloze.launch.system.software import software
from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import ASIDE, holding, publish_text, readable_errors
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.untrusted import load_json, load_yaml, read_json

CONFIG = "config.yaml"
DATA = "data.json"
DEVICE = "device.json"  # what was chosen by the device at the first start
DEEPSPEED = "deepspeed.json"
SOFTWARE = "software.json"  # versions of the newest start, and the number of starts
STATUS = "status.json"
METRICS = "metrics.jsonl"
TRACKING = "trackers.json"  # state of the trackers, for resumes
TOKENIZER = "tokenizer"
MODEL = "model"  # written by a complete fine-tuning run
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
HEARTBEATS = "heartbeats"
STARTS = "starts"  # in software.json
TRAINED_LENGTH = "max_length"  # in data.json

Facts = Mapping[str, str | int]  # facts of the inputs of a run, by name: hashes, fingerprints, lengths

# Files that an interrupted start may leave without CONFIG.
_BEFORE_CONFIG = {LOCK, HEARTBEATS, DATA, DEVICE, STATUS, SOFTWARE, DEEPSPEED, TRACKING}

# Fields of every kind of run. (With dropout another micro-batch size drops other units, as does another world size.)
FREE_FIELDS = {name.rstrip(".") for kind in (PretrainConfig, FinetuneConfig) for name in marked(kind, marks.FREE)}
# Facts that must not change at a resume, besides the marked fields: the weights belong to one tokenizer.
FIXED = ("tokenizer_fingerprint", *marked(PretrainConfig, marks.FIXED))


def flatten(values: Fields, prefix: str = "") -> dict[str, object]:
    """Nested fields by their dotted names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _shaping(values: Fields) -> dict[str, object]:
    """The fields that shape the result, by dotted name."""
    return {
        name: value
        for name, value in flatten(values).items()
        if name not in FREE_FIELDS and name.split(".")[0] not in FREE_FIELDS
    }


def _defaults(config: Any) -> dict[str, object]:
    """The fields of a configuration and its sections that have a default, with that default."""
    found: dict[str, object] = {}
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            found[field.name] = _defaults(value)
        elif field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return found


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the fields that shape the result: the same for all starts of a run, wherever its folder is."""
    return hashlib.sha256(json.dumps(_shaping(asdict(config)), sort_keys=True).encode()).hexdigest()


def data_facts(manifest: Manifest) -> dict[str, str | int]:
    """Facts of the prepared data of a run: hashes, lengths, counts."""
    return {
        "manifest_hash": manifest.hash,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        TRAINED_LENGTH: manifest.max_length,
    }


def trained_length(folder: Path) -> int | None:
    """Length in tokens of the longest samples of a pretraining run; None if an earlier version wrote it."""
    return read_fields(folder / DATA).get(TRAINED_LENGTH)


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
                raise UserError(f"run: found {found} {path.parent}, {expected}")
            text = path.read_text(encoding="utf-8")
            # JSON is not parsed as YAML, in which 1e-05 and NaN are strings.
            content = load_json(text) if path.suffix == ".json" else load_yaml(text, name=str(path))
    except UserError:  # also a ValueError, but with its own message
        raise
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise UserError(f"{path}: found what is no {kind}, {expected}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: found no fields, expected those of a run")
    return content


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
            "give one of the runs in it"
        )


def tokenizer_folder(folder: Path) -> Path:
    """The folder with the tokenizer of a run or of a model folder."""
    return folder / TOKENIZER if is_pretraining(folder) else model_folder(folder)


def device_facts(folder: Path) -> dict[str, object]:
    """What was chosen by the device at the first start of the run; empty for a new run or one of an earlier version."""
    return read_fields(folder / DEVICE) if (folder / DEVICE).is_file() else {}


def keep_device_facts(folder: Path, facts: dict[str, object]) -> None:
    """Save what was chosen by the device, unless the run has begun."""
    if not (folder / DEVICE).is_file():
        publish_text(folder / DEVICE, json.dumps(facts, indent=1) + "\n")


def saved_micro_batch_size(folder: Path) -> int | None:
    """The micro-batch size of an earlier start of this run; None if there is none."""
    return read_fields(folder / CONFIG)["train"]["micro_batch_size"] if (folder / CONFIG).is_file() else None


def saved_data_streams(folder: Path, accept_changes: bool) -> int | None:
    """The number of data streams of an earlier start of this run; None if there is none.

    Raises:
        UserError: an earlier version began the run with an order of samples that this version lacks, and changes are
        not accepted.
    """
    if not (folder / CONFIG).is_file():
        return None
    streams = read_fields(folder / CONFIG).get("data_streams")
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


def check_folder(config: RunConfig, facts: Facts, shown: str | None = None) -> None:
    """Refuse a folder that holds anything but an earlier part of this run.

    Args:
        config: configuration of the run.
        facts: facts of the inputs of the run, among them the tokenizer's fingerprint.
        shown: name of the folder in errors; None: its path.

    Raises:
        UserError: names the first field that differs, with both values.
    """
    folder = Path(config.output)
    shown = shown or str(folder)
    if not folder.exists() or (folder.is_dir() and not _entries(folder) - _BEFORE_CONFIG):
        return  # an interrupted start leaves only these
    if not (folder / CONFIG).is_file():
        where = folder / min(_entries(folder) - _BEFORE_CONFIG) if folder.is_dir() else folder
        raise UserError(
            f"output: found {shown} with files that are not a run's ({where}), expected a new "
            "folder or an earlier part of this run; choose another --output"
        )
    before = _shaping(read_fields(folder / CONFIG)) | read_fields(folder / DATA)
    _refuse_another(
        f"output: found {shown} with another run",
        before,
        config,
        facts,
        "choose another --output",
        repeated=None if is_url(shown) else folder / CONFIG,
        states=has_checkpoints(folder),
    )


def check_checkpoint(folder: Path, state: Fields, config: RunConfig, facts: Facts) -> None:
    """Refuse a checkpoint of another run, which may have been copied into the run's folder.

    Args:
        folder: folder of the checkpoint.
        state: content of its state.json; in one of an earlier version, without the fields, only the hashes are
            compared.

    Raises:
        UserError: names the first field that differs, with both values.
    """
    hashes = {name: state[name] for name in facts if name in state}
    if "shaping" in state:
        before = state["shaping"] | hashes
    else:
        before = shaping_of(config, facts) | hashes
    _refuse_another(
        f"{folder}: found a checkpoint of another run", before, config, facts, "remove it to resume from an older one"
    )


def shaping_of(config: RunConfig, facts: Facts) -> dict[str, object]:
    """What shapes the result of a run, by dotted name: fields, and facts of its inputs."""
    return {**_shaping(asdict(config)), **facts}


def _refuse_another(
    found: str,
    before: dict[str, object],
    config: RunConfig,
    facts: Facts,
    fix: str,
    repeated: Path | None = None,
    states: bool = True,
) -> None:
    """Raise UserError, which begins with `found`, for the first field that differs from before and must not.

    Args:
        repeated: file of the run's configuration, suggested for --config.
        states: whether there are optimizer states to resume from.
    """
    # A field that an earlier version did not have gets its default.
    unknown = {name: facts[name] for name in facts if name == TRAINED_LENGTH}
    before = _shaping(_defaults(config)) | unknown | before
    now = shaping_of(config, facts)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) == now.get(name):
            continue
        if (
            states
            and name == "train.precision"
            and config.sharding_stage > 0
            and "bf16" in (before.get(name), now[name])
        ):
            new = (
                ", or begin a new run with its weights by --init_from and another --output"
                if isinstance(config, PretrainConfig)
                else ""
            )
            raise UserError(
                f"{found}, whose {name} is {before.get(name)!r}, expected {now[name]!r}: at zero.stage "
                f"{config.zero.stage} optimizer states of bf16 do not become those of another precision, "
                f"nor these bf16's; keep --{name} {before.get(name)}{new}"
            )
        acceptable = not name.startswith(FIXED)
        if acceptable and config.checkpoint.accept_changes:
            continue
        if repeated and name not in facts:
            fix += f", or repeat the run's configuration with --config {repeated}"
        if acceptable:
            fix += ", or accept the change with --checkpoint.accept_changes true"
        raise UserError(f"{found}, whose {name} is {before.get(name)!r}, expected {now.get(name)!r}; {fix}")


def _entries(folder: Path) -> set[str]:
    """Names in a folder, without leftovers of interrupted writes and conversions."""
    empty = all(path.suffix == ".tmp" for path in (folder / CHECKPOINTS).glob("*"))
    names = {path.name for path in folder.iterdir() if not path.name.startswith(ASIDE)}
    return names - ({CHECKPOINTS} if empty else set())


def describe(
    folder: Path, config: RunConfig, facts: Facts, save_tokenizer: Callable[[Path], object], deepspeed: Fields
) -> None:
    """Write the configurations and the tokenizer of the run, which are needed to understand, repeat and export it."""
    publish_text(folder / DATA, json.dumps(facts, indent=1) + "\n")
    # The file that marks the folder as a run comes after the files that a resume compares; after an interruption the
    # next start writes the rest.
    publish_text(folder / CONFIG, yaml.safe_dump(asdict(config), sort_keys=False))
    publish_text(folder / SOFTWARE, json.dumps(software() | {STARTS: num_starts(folder) + 1}, indent=1) + "\n")
    publish_text(folder / DEEPSPEED, json.dumps(deepspeed, indent=1) + "\n")
    target = folder / TOKENIZER
    if not target.exists():
        aside = folder / (TOKENIZER + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        with readable_errors(aside):
            save_tokenizer(aside)
            aside.rename(target)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the run for one job at a time: a requeued job must not run beside the one that it replaces.

    Raises:
        UserError: another job holds the lock, or the file system has no locks.
    """
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with holding(folder / LOCK) as held:
        if not held:
            raise UserError(
                f"output: found {folder} in use by another job, expected it free; wait for that job or "
                "choose another --output"
            )
        yield


def in_use(folder: Path) -> bool:
    """Whether a job holds the run's lock.

    Raises:
        UserError: as `locked` does.
    """
    if not (folder / LOCK).exists():
        return False
    with holding(folder / LOCK) as held:
        return not held


def set_status(folder: Path, state: str, step: int | None) -> None:
    """Write status.json. The job templates read it.

    Args:
        state: running, requeue (stopped early with a checkpoint: submit again), complete, failed.
    """
    publish_text(folder / STATUS, json.dumps({"state": state, "step": step}) + "\n", durable=state != "running")


@contextmanager
def recording_failure(folder: Path) -> Iterator[None]:
    """Set the status `running` at once, so that a start that fails or is killed does not leave an earlier status; and
    `failed` if an error ends the start before it has set another status.
    """
    set_status(folder, "running", read_status(folder).get("step", 0))
    try:
        yield
    except BaseException:
        with suppress(UserError):  # the disk may be full, which is then the error being raised
            if (status := read_status(folder)).get("state") == "running":
                set_status(folder, "failed", status.get("step", 0))
        raise


def read_status(folder: Path) -> Fields:
    """Content of status.json: state and step; empty where it is missing or damaged."""
    try:
        status = read_json(folder / STATUS)
    except (OSError, ValueError):
        return {}
    if not isinstance(status, dict) or not isinstance(status.get("state"), str):
        return {}
    return status | {"step": status["step"] if type(status.get("step")) is int else 0}


def num_starts(folder: Path) -> int:
    """How often the run has been started; 0 where it is not known, as for a run that an earlier version began."""
    try:
        return int(read_json(folder / SOFTWARE).get(STARTS, 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def read_metrics(folder: Path) -> list[Fields]:
    """The lines of a run's metrics.jsonl except damaged ones; the last line may be incomplete."""
    return lines_of((folder / METRICS).read_bytes())[0]


def lines_of(content: bytes) -> tuple[list[Fields], int]:
    """The lines of the content of a metrics.jsonl, and the number of damaged ones, which are left out; an incomplete
    last line does not count as damaged.
    """
    *whole, last = content.split(b"\n")
    found = [metrics_of(line) for line in whole]
    lines = [line for line in (*found, metrics_of(last)) if line is not None]
    return lines, found.count(None)


def metrics_of(line: bytes) -> Fields | None:
    """Content of a line of metrics.jsonl: a step, and values by curve, null for one that was not finite; None if the
    line is damaged.
    """
    try:
        values = load_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return None
    return values if all(value is None or isinstance(value, (int, float)) for value in values.values()) else None


def kept_lines(lines: list[Fields], step: int, evaluated_step: int) -> list[Fields]:
    """The lines that stay when a run resumes from a step.

    Args:
        evaluated_step: step of the last evaluation before it.
    """
    return [line for line in lines if line["step"] <= (evaluated_step if is_evaluation(line) else step)]


def is_evaluation(line: Mapping[str, object]) -> bool:
    """Whether a line of metrics.jsonl has the figures of an evaluation."""
    return any(name.startswith("validation/") for name in line)


def check_there(folder: Path) -> None:
    """Raise UserError if something that `describe` has written is not in the run's folder any more."""
    for name in (CONFIG, DATA, SOFTWARE, DEEPSPEED, TOKENIZER):
        if not (folder / name).exists():
            raise UserError(
                f"{folder}: found no {name}, expected it as the run has written it: something was removed while the "
                "run used the folder; the same command writes it again and goes on from the newest checkpoint that is "
                "left"
            )
