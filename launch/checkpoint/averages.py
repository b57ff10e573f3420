"""Exponential moving averages of the weights in checkpoints: each process saves its part; exports join the parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from cloze.launch.checkpoint.deepspeed_files import load_pickled
from cloze.launch.checkpoint.state import read_state
from cloze.pipeline.errors import UserError

# Name of a parameter -> where a flat part of it begins, and the part, fp32.
Parts = dict[str, tuple[int, torch.Tensor]]


def average_file(rank: int | None) -> str:
    """Name of the file with a rank's parts; None: of the one with all of them, where nothing is partitioned."""
    return "ema.pt" if rank is None else f"ema-rank-{rank:05d}.pt"


def average_content(parts: Parts, tied: dict[str, str]) -> dict:
    """What such a file holds. tied: further name of a parameter -> the one that its parts have."""
    return {"parts": {name: list(part) for name, part in parts.items()}, "tied": tied}


def has_average(folder: Path) -> bool:
    """Whether a checkpoint holds a moving average, or what a machine has of it: the files of its own processes, where
    it fetched the checkpoint from a store."""
    return any(folder.glob("ema*.pt"))


def read_parts(folder: Path, rank: int | None = None) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, begin and part of whatever a checkpoint holds of the average; with a rank, of what that one has kept.

    Raises:
        UserError: a file is damaged or holds anything but tensors.
    """
    state = read_state(folder)
    ranks = [None] if state["zero_stage"] == 0 else range(state["world_size"]) if rank is None else [rank]
    for each in ranks:
        for name, (start, part) in load_pickled(folder / average_file(each))["parts"].items():
            yield name, start, part


def whole_average(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The average of all weights in a checkpoint, in the shapes of `weights`, which what has no average keeps (buffers,
    and what does not learn).

    Raises:
        UserError: the checkpoint holds no average.
    """
    if not has_average(folder):
        raise UserError(f"ema: found no moving average in {folder}, expected a run with --ema.decay; leave --ema out")
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name, start, part in read_parts(folder):
        found[name].view(-1)[start:start + len(part)] = part
    names = average_file(None if read_state(folder)["zero_stage"] == 0 else 0)
    for name, first in load_pickled(folder / names)["tied"].items():
        if name in found:
            found[name] = found[first]
    return found
