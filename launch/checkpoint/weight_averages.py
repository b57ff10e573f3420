"""Averages of the weights in checkpoints: each process saves its part; exports join the parts."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from cloze.launch.checkpoint.deepspeed_files import load_pickled
from cloze.launch.checkpoint.state import read_state
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# Name of a parameter -> offset of a flat fp32 part of it, and the part.
Parts = dict[str, tuple[int, torch.Tensor]]


def average_file(rank: int | None) -> str:
    """Name of the file with a rank's parts; None: name of the file with whole parameters, where nothing is
    partitioned.
    """
    return "ema.pt" if rank is None else f"ema-rank-{rank:05d}.pt"


def average_content(parts: Parts, tied: dict[str, str]) -> Fields:
    """Content of such a file.

    Args:
        tied: additional name of a tied parameter -> the name under which its parts are stored.
    """
    return {"parts": {name: list(part) for name, part in parts.items()}, "tied": tied}


def has_average(folder: Path) -> bool:
    """Whether a checkpoint, or this machine's part of one that was fetched from a store, holds an average."""
    return any(folder.glob("ema*.pt"))


def read_parts(folder: Path, rank: int | None = None) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, offset and part of all stored parts of the average; with a rank, of those that this rank saved.

    Raises:
        UserError: a file is damaged or holds anything but tensors.
    """
    state = read_state(folder)
    ranks = [None] if state["zero_stage"] == 0 else range(state["world_size"]) if rank is None else [rank]
    for saved_by in ranks:
        for name, (start, part) in load_pickled(folder / average_file(saved_by))["parts"].items():
            yield name, start, part


def whole_average(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The averaged weights of a checkpoint, in the shapes of `weights`; tensors without an average (buffers, frozen
    parameters) are those of `weights`.

    Raises:
        UserError: the checkpoint holds no average.
    """
    if not has_average(folder):
        raise UserError(
            f"ema: found no average in {folder}, expected a run with --ema.decay or --ema.tail_share; leave --ema out"
        )
    averaged, covered = {name: tensor.clone() for name, tensor in weights.items()}, Counter[str]()
    for name, start, part in read_parts(folder):
        averaged[name].view(-1)[start : start + len(part)] = part
        covered[name] += len(part)
    for name, count in covered.items():
        if count != averaged[name].numel():
            raise UserError(
                f"{folder}: found the averages of {count:,} weights of {name}, expected those of all "
                f"{averaged[name].numel():,}; leave --ema out, or take another checkpoint"
            )
    names = average_file(None if read_state(folder)["zero_stage"] == 0 else 0)
    for name, first in load_pickled(folder / names)["tied"].items():
        if name in averaged:
            averaged[name] = averaged[first]
    return averaged
