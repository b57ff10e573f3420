"""Checkpoints that have only what makes them a checkpoint."""

import json

import torch

from cloze.launch.checkpoint import CheckpointManager
from cloze.launch.system.environment import Environment
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
