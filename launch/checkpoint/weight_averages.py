"""Averages of the weights in checkpoints: each process saves its part; exports join the parts."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from cloze.launch.checkpoint.deepspeed_files import load_own
from cloze.launch.checkpoint.state import read_state
from cloze.launch.engine.content import (
    OtherContent,
    check_tensor,
    count_in,
    described,
    fields_in,
    list_in,
    of_file,
)
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# Name of a parameter -> offset of a flat fp32 part of it, and the part.
Parts = dict[str, tuple[int, torch.Tensor]]


def average_file(rank: int | None) -> str:
    """Name of the file with a rank's parts; None: name of the file with whole parameters, where nothing is
    partitioned.
    """
    return "ema.pt" if rank is None else f"ema-rank-{rank:05d}.pt"


def average_content(parts: Parts, tied: dict[str, str], frozen: Iterable[str]) -> Fields:
    """Content of such a file.

    Args:
        tied: additional name of a tied parameter -> the name under which its parts are stored.
        frozen: the parameters that are not trained, which have no average.
    """
    return {"parts": {name: list(part) for name, part in parts.items()}, "tied": tied, "frozen": list(frozen)}


def has_average(folder: Path) -> bool:
    """Whether a checkpoint, or this machine's part of one that was fetched from a store, holds an average."""
    return any(folder.glob("ema*.pt"))


def read_parts(folder: Path, rank: int | None = None) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, offset and part of all stored parts of the average; with a rank, of those that this rank saved.

    Raises:
        UserError: a file is damaged or holds anything but tensors.
        OtherContent: a file holds no parts.
    """
    state = read_state(folder)
    ranks = [None] if state["zero_stage"] == 0 else range(state["world_size"]) if rank is None else [rank]
    for saved_by in ranks:
        content = load_own(folder / average_file(saved_by))
        with of_file(average_file(saved_by)):
            for name, part in fields_in(content.get("parts"), "parts").items():
                start, values = list_in(part, f"parts.{name}", 2)
                count_in(start, f"the offset of {name}")
                if not isinstance(values, torch.Tensor):
                    raise OtherContent(f"the part of {name} is {described(values)}, expected a tensor")
                yield name, start, check_tensor(values, f"the part of {name}", [values.numel()], torch.float32)


class Coverage:
    """Which elements of which tensors the parts of an average have had a value for.

    Args:
        sizes: number of elements of each tensor.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._parts: dict[str, list[tuple[int, int]]] = {}

    def add(self, name: str, start: int, stop: int) -> None:
        """Add the elements [start, stop) of a tensor, or raise OtherContent if it has fewer, or does not exist."""
        if stop > self._sizes.get(name, -1):
            raise OtherContent(
                f"found the averages of {stop:,} weights of {name:.100}, expected those of its own alone"
            )
        self._parts.setdefault(name, []).append((start, stop))

    def check(self, names: Iterable[str]) -> None:
        """Raise OtherContent for the first tensor of which an element has no value, or two."""
        for name in names:
            reached = 0
            for start, stop in sorted(self._parts.get(name, ())):
                if start != reached:
                    break
                reached = stop
            if reached != self._sizes[name]:
                raise OtherContent(
                    f"found the averages of {reached:,} weights of {name}, expected those of all {self._sizes[name]:,}"
                )


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
    averaged = {name: tensor.clone() for name, tensor in weights.items()}
    covered = Coverage({name: tensor.numel() for name, tensor in weights.items()})
    for name, start, part in read_parts(folder):
        covered.add(name, start, start + len(part))
        averaged[name].view(-1)[start : start + len(part)] = part
    tied, frozen = _names_in(folder)
    covered.check(name for name in weights if name not in tied and name not in frozen)
    for name in tied.keys() & weights.keys():
        averaged[name] = averaged[tied[name]]
    return averaged


def _names_in(folder: Path) -> tuple[dict[str, str], set[str]]:
    """The tied parameters of an average, each with the one that has its parts, and the parameters without any."""
    file = average_file(None if read_state(folder)["zero_stage"] == 0 else 0)
    content = load_own(folder / file)
    tied, frozen = fields_in(content.get("tied"), "tied"), content.get("frozen", [])  # earlier versions wrote no frozen
    parts = fields_in(content.get("parts"), "parts")
    for name, first in tied.items():
        if name in parts or not isinstance(first, str):
            raise OtherContent(f"{file}: tied.{name} is {described(first)}, expected another name of one with parts")
    names = list_in(frozen, "frozen", len(frozen) if isinstance(frozen, list) else 0)
    return tied, {name for name in names if isinstance(name, str)}
