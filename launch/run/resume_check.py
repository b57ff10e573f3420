"""Whether a folder or a checkpoint belongs to this run: what shapes its result, compared at each start."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from cloze.launch.config import FinetuneConfig, PretrainConfig, RunConfig
from cloze.launch.config.changes_at_resume import FIXED, FREE, marked
from cloze.launch.run.runs import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    DEEPSPEED,
    DEVICE,
    HEARTBEATS,
    LOCK,
    MODEL_HASH,
    POOLED_SETS,
    SET_HASH,
    SOFTWARE,
    STATUS,
    TRACKING,
    TRAINED_LENGTH,
    VALIDATION_HASH,
    Facts,
    check_own,
    fields_of,
    flatten,
    has_checkpoints,
    read_fields,
)
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import ASIDE
from cloze.pipeline.stores.places import is_url

# Files that an interrupted start may leave without CONFIG.
_BEFORE_CONFIG = {LOCK, HEARTBEATS, DATA, DEVICE, STATUS, SOFTWARE, DEEPSPEED, TRACKING}

# Fields of every kind of run. (With dropout another micro-batch size drops other units, as does another world size.)
FREE_FIELDS = {name.rstrip(".") for kind in (PretrainConfig, FinetuneConfig) for name in marked(kind, FREE)}
# Facts that must not change at a resume, besides the marked fields: the weights belong to one tokenizer.
FIXED_FACTS = ("tokenizer_fingerprint", *marked(PretrainConfig, FIXED))


def _shaping(values: Fields) -> dict[str, object]:
    """The fields that shape the result, by dotted name."""
    return {
        name: value
        for name, value in flatten(values).items()
        if name not in FREE_FIELDS and name.split(".")[0] not in FREE_FIELDS
    }


def _defaults(config: Any) -> dict[str, object]:
    """The fields of a configuration and its sections that have a default, with that default."""
    facts: dict[str, object] = {}
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            facts[field.name] = _defaults(value)
        elif field.default is not MISSING:
            facts[field.name] = field.default
        elif field.default_factory is not MISSING:
            facts[field.name] = field.default_factory()
    return facts


def fields_made(folder: Path, kind: RunConfig) -> dict[str, object]:
    """The resolved configuration of a run, by dotted names; a field that an earlier version did not have gets the
    default of `kind`'s.

    Raises:
        UserError: the folder holds none.
    """
    return flatten(_defaults(kind)) | fields_of(folder)


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the fields that shape the result: the same for all starts of a run, wherever its folder is."""
    return hashlib.sha256(json.dumps(_shaping(asdict(config)), sort_keys=True).encode()).hexdigest()


def run_hash(config: RunConfig, first_weights: str) -> str:
    """What tells a run from others at its start: the fields that shape it, and the hash of the weights that it begins
    with, where these do not say them (empty).
    """
    own = config_hash(config)
    return hashlib.sha256(f"{own} {first_weights}".encode()).hexdigest() if first_weights else own


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
    if not folder.exists():
        return
    entries = _entries(folder) if folder.is_dir() else set()
    # A start holds the lock before it writes here, but for heartbeats: without it such names are a user's files. A run
    # in a store has fetched them.
    foreign = entries - (_BEFORE_CONFIG if LOCK in entries or is_url(shown) else {HEARTBEATS})
    if folder.is_dir() and not foreign:
        return  # an interrupted start
    if not (folder / CONFIG).is_file():
        where = folder / min(foreign) if foreign else folder
        raise UserError(
            f"output: found {shown} with files that are not a run's ({where}), expected a new "
            "folder or an earlier part of this run; choose another --output"
        )
    before = _shaping(read_fields(folder / CONFIG)) | _of_training(read_fields(folder / DATA))
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
    hashes = {name: state[name] for name in _of_training(facts) if name in state}
    if "shaping" in state:
        before = state["shaping"] | hashes
    else:
        before = shaping_of(config, facts) | hashes
    _refuse_another(
        f"{folder}: found a checkpoint of another run", before, config, facts, "remove it to resume from an older one"
    )
    if not config.checkpoint.accept_changes:
        check_own(Path(config.output), folder, state)


def shaping_of(config: RunConfig, facts: Facts) -> dict[str, object]:
    """What shapes the result of a run, by dotted name: fields, and facts of its inputs."""
    return {**_shaping(asdict(config)), **_of_training(facts)}


def _of_training(facts: Mapping[str, Any]) -> Fields:
    """Without those of the sets on which the run is only measured."""
    return {name: value for name, value in facts.items() if not name.startswith((SET_HASH, POOLED_SETS))}


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
    unknown = {name: facts[name] for name in facts if name in (TRAINED_LENGTH, VALIDATION_HASH, MODEL_HASH)}
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
        acceptable = not name.startswith(FIXED_FACTS)
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
