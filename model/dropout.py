"""Dropout whose masks depend on a key, never on what was drawn before.

A mask is drawn from a generator seeded with (seed of the forward, layer, place). A resumed run and a layer
recomputed under gradient checkpointing therefore draw what the first pass drew, with no generator state to
save. Sixteen random bits decide about an element: four elements for each 64-bit draw, several times cheaper
than one float for each, and a probability is honoured to 1 / 65536.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

_LEVELS = 1 << 16  # values of 16 random bits


class DropoutKey(NamedTuple):
    """Key of one layer's masks; None in its place means that nothing is dropped."""

    seed: int
    layer: int

    def at(self, place: int) -> int:
        """Seed of one place in the layer: 64 bits, mixed so that neighbouring keys share no pattern
        (splitmix64).
        """
        mixed = 0
        for part in (self.seed, self.layer, place):
            mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 31
        return mixed & 0x7FFFFFFFFFFFFFFF  # manual_seed takes a signed 64-bit integer


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def keep_mask(shape: torch.Size | tuple[int, ...], probability: float, seed: int, device: torch.device) -> Tensor:
    """Bool tensor of `shape` on `device`, False with `probability` (rounded to 1 / 65536); equal for equal
    seeds.
    """
    generator = _generator(device).manual_seed(seed)
    numel = 1
    for size in shape:
        numel *= size
    words = torch.empty(-(-numel // 4), dtype=torch.int64, device=device)
    bits = words.random_(-(1 << 63), None, generator=generator).view(torch.int16)[:numel]
    return (bits >= round(probability * _LEVELS) - _LEVELS // 2).view(shape)


def keep_scale(probability: float) -> float:
    """What kept elements are multiplied with: one over the share that `keep_mask` keeps."""
    return 1 / (1 - round(probability * _LEVELS) / _LEVELS)


def dropout(inputs: Tensor, probability: float, seed: int | None) -> Tensor:
    """Dropout of `inputs` (any shape and floating dtype) keyed by `seed`; unchanged without a seed or at p =
    0.
    """
    if seed is None or probability == 0:
        return inputs
    keep = keep_mask(inputs.shape, probability, seed, inputs.device)
    return inputs.mul(keep).mul_(keep_scale(probability))


def draw_seed() -> int:
    """A seed from torch's default CPU generator, for forwards in training that are given none."""
    return int(torch.randint(1 << 62, ()))
