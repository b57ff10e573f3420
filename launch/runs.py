"""The folder of a run: whose it is, what it was told, how it ended."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import yaml

from launch.config import PretrainConfig
from pipeline.errors import UserError
from pipeline.storage import publish_text

CONFIG = "config.yaml"
DEEPSPEED = "deepspeed.json"
STATUS = "status.json"
TOKENIZER = "tokenizer"
CHECKPOINTS = "checkpoints"

# Fields that say where and how, not what: a run may go on with others, and its result is the same.
FREE_FIELDS = {
    "data", "output", "checkpoint", "zero", "train.micro_batch_size", "train.log_every_steps",
    "train.evaluate_every_steps", "train.evaluation_samples", "train.gradient_checkpointing", "train.attention_kernel",
}  # fmt: skip


def _flatten(values: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def identity(config: PretrainConfig) -> dict[str, object]:
    """The fields that shape a run's result, by dotted name."""
    return {
        name: value for name, value in _flatten(asdict(config)).items()
        if name not in FREE_FIELDS and name.split(".")[0] not in FREE_FIELDS
    }


def config_hash(config: PretrainConfig) -> str:
    """SHA-256 of the fields that shape the result."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()


def read_config(folder: Path) -> dict:
    """The resolved configuration of a run, as plain values.

    Raises:
        UserError: the folder holds no run.
    """
    path = folder / CONFIG
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{folder}: found no readable {CONFIG}, expected the folder of a run of `cloze pretrain` "
                        f"({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: found no fields, expected the configuration of a run")
    return content


def check_folder(config: PretrainConfig, manifest_hash: str) -> None:
    """Refuse a folder that holds something else than an earlier part of this very run.

    Raises:
        UserError: names the first field that differs, with both values.
    """
    folder = Path(config.output)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / CONFIG).exists():
        raise UserError(f"output: found {folder} with files that are no run, expected a new folder or an earlier part "
                        "of this run; choose another --output")
    before = read_config(folder)
    mend = "choose another --output, or accept the change with --checkpoint.accept_changes true"
    if config.checkpoint.accept_changes:
        return
    if before.get("manifest_hash") != manifest_hash:
        raise UserError(f"output: found {folder} with another run, trained on other shards ({before.get('data')}), "
                        f"expected {config.data}; {mend}")
    before = _flatten(before)
    for name, value in identity(config).items():
        if before.get(name) != value:
            raise UserError(f"output: found {folder} with another run, whose {name} is {before.get(name)!r}, expected "
                            f"{value!r}; {mend}")


def describe(config: PretrainConfig, manifest_hash: str, tokenizer: Path) -> None:
    """Write what is needed to understand, repeat and export the run: its configuration and its tokenizer."""
    folder = Path(config.output)
    # First, since it is what makes the folder a run's: whatever is missing when a start is cut short, the next adds.
    publish_text(folder / CONFIG, yaml.safe_dump({**asdict(config), "manifest_hash": manifest_hash}, sort_keys=False))
    target = folder / TOKENIZER
    if not target.exists():
        aside = folder / (TOKENIZER + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(tokenizer, aside)
        aside.rename(target)


def set_status(folder: Path, state: str, step: int) -> None:
    """state: running, requeue (stopped early with a checkpoint: submit again) or complete. Job templates read it."""
    publish_text(folder / STATUS, json.dumps({"state": state, "step": step}) + "\n")
