"""Checkpoints that have only what makes them a checkpoint, and such as no run writes."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from cloze.launch.checkpoint.deepspeed_files import load_pickled
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import CHECKSUMS, STATE, hash_of_files
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.storage import sha256_of


def manager(folder, warnings: list[str]) -> CheckpointManager:
    return CheckpointManager(folder, Environment(), torch.device("cpu"), keep_last=2, warn=warnings.append)


def publish(checkpoints: CheckpointManager, step: int, *contents: bytes, facts: dict | None = None) -> None:
    """A checkpoint with a file of each process, published as a run does."""
    aside = checkpoints.path(step).with_suffix(".tmp")
    aside.mkdir(parents=True)
    parts = []
    for rank, content in enumerate(contents):
        path = aside / f"rank-{rank:05d}.pt"
        path.write_bytes(content)
        parts.append(json.dumps({path.name: (len(content), sha256_of(path))}))
    checkpoints._publish(
        aside, checkpoints.path(step), parts, {"step": step, "world_size": 1, "zero_stage": 0, **(facts or {})}
    )


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change the content of a file of a checkpoint, and all hashes accordingly."""
    content = load_pickled(path)
    change(content)
    torch.save(content, path)
    sign(path)


def sign(path: Path) -> None:
    """Let the hashes of a checkpoint be those of a file in it."""
    listed = path.with_name(CHECKSUMS)
    checksums = json.loads(listed.read_text())
    checksums[path.name] = [path.stat().st_size, sha256_of(path)]
    state = path.with_name(STATE)
    state.write_text(json.dumps(json.loads(state.read_text()) | {"files_hash": hash_of_files(checksums)}))
    checksums[STATE] = [state.stat().st_size, sha256_of(state)]
    listed.write_text(json.dumps(checksums))
