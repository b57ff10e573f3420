"""Dropout masks from a hash of a key, with no generator state.

A mask is a hash of (key, row, column). The same elements are dropped in a resumed run and in a layer recomputed under
gradient checkpointing, without generator state to save; and on the CPU, on a GPU and in compiled code, which fuses the
hash with its use. Each element uses sixteen random bits, so a probability is exact to 1 / 65536.

All arithmetic uses 32-bit integers that wrap. A row has 32 bits from a hash of key and row (`row_bits`), a pair of
columns 32 bits from a hash of the row's bits and the pair. The hash is "lowbias32" (Wellons' hash-prospector) with
logical shifts. With arithmetic shifts, which need no mask, columns were correlated (by up to 0.15).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LEVELS = 1 << 16  # values of 16 random bits


def _signed(number: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


_STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B1, 0x7FEB352D, 0x846CA68B))
# Pairs of columns hashed at a time, by whether the device is a GPU: as many as fit a CPU's caches, all at once on a
# GPU.
_CHUNK_PAIRS = {False: 1 << 16, True: None}
_ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}  # the bits of 1.0

# Places of masks in a layer (`DropoutKey.at`), each of its own number: equal ones would drop the same elements. The
# embeddings (layer 0) and the heads (after the last layer) have one place each, 0.
AFTER_ATTENTION, AFTER_CROSS_ATTENTION, AFTER_FEED_FORWARD = 0, 1, 2
IN_ATTENTION, IN_CROSS_ATTENTION, IN_DISTANCES, IN_CONVOLUTION = 3, 4, 5, 6


class DropoutKey(NamedTuple):
    """Key of one layer's masks; None instead of a key: no dropout."""

    seed: int
    layer: int

    def at(self, place: int) -> int:
        """Seed of one place in the layer: 64 bits, mixed by splitmix64 so that neighbouring keys are unrelated."""
        mixed = 0
        for part in (self.seed, self.layer, place):
            mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 31
        return mixed & 0x7FFFFFFFFFFFFFFF  # torch's generators take a signed 64-bit integer


def row_bits(keys: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """Random bits of the rows of a mask for each key (64 bits): (keys, rows) int32 on `device`. The host does not
    wait.
    """
    halves = torch.tensor([[_signed(key), _signed(key >> 32)] for key in keys], dtype=torch.int32)
    if device.type == "cuda":
        halves = halves.pin_memory().to(device, non_blocking=True)
    low, high = halves.T.unsqueeze(-1)
    bits = torch.arange(rows, dtype=torch.int32, device=device) * _STEP ^ low
    bits = _mixed(bits ^ _shifted(bits, 16)) ^ high
    return _mixed(bits ^ _shifted(bits, 16))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right."""
    return bits >> count & (1 << 32 - count) - 1


def _mixed(bits: Tensor) -> Tensor:
    bits = bits * _FIRST
    bits = (bits ^ _shifted(bits, 15)) * _SECOND
    return bits ^ _shifted(bits, 16)


def keep_masks(bits: Tensor, width: int, probability: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """For each row of `bits` (masks, rows) a mask (rows, width) in `dtype`: 0 with `probability` (rounded to 1 /
    65536), else 1; equal for equal bits, also in compiled code.
    """
    limit = round(probability * _LEVELS) - _LEVELS // 2
    if torch.compiler.is_compiling():  # one elementwise expression, which compilers fuse
        columns = torch.arange(width, dtype=torch.int32, device=bits.device)
        pairs, shifts = (columns >> 1) * _STEP, (1 - (columns & 1)) * 16
        return tuple(((_mixed(each[:, None] ^ pairs) << shifts) >> 16 >= limit).to(dtype) for each in bits.unbind())
    rows = bits.reshape(-1, 1)
    pairs = torch.arange(-(-width // 2), dtype=torch.int32, device=bits.device) * _STEP
    chunk = _CHUNK_PAIRS[bits.is_cuda]
    if chunk is None:
        keep = (_mixed_in_place(rows ^ pairs).view(torch.int16) >= limit).to(dtype)
    else:
        keep = torch.empty(len(rows), 2 * len(pairs), dtype=dtype, device=bits.device)
        count = max(1, chunk // max(1, len(pairs)))
        for some, kept in zip(rows.split(count), keep.split(count), strict=True):
            _compare(_mixed_in_place(some ^ pairs).view(torch.int16), limit, kept)
    return keep[:, :width].view(*bits.shape, width).unbind()


def _mixed_in_place(bits: Tensor) -> Tensor:
    shifted = torch.empty_like(bits)
    for factor, count in ((_FIRST, 15), (_SECOND, 16)):
        bits.mul_(factor)
        torch.bitwise_right_shift(bits, count, out=shifted)
        bits.bitwise_xor_(shifted.bitwise_and_((1 << 32 - count) - 1))
    return bits


def _compare(values: Tensor, limit: int, kept: Tensor) -> None:
    """Write whether int16 `values` are at least `limit` into `kept`, of any dtype; on a CPU."""
    if kept.dtype not in _ONE or limit == -_LEVELS // 2:
        kept.copy_(values >= limit)
        return
    # Clamping to limit - 1 and limit, then subtracting, is several times as fast as comparing.
    one, kept = _ONE[kept.dtype], kept.view(torch.int16)
    torch.clamp(values, limit - 1, limit, out=kept)
    kept.sub_(limit - 1).mul_(one)


def keep_scale(probability: float) -> float:
    """Factor of kept elements: 1 / (share that `keep_masks` keep)."""
    return 1 / (1 - round(probability * _LEVELS) / _LEVELS)


def dropout(inputs: Tensor, probability: float, seed: int | None) -> Tensor:
    """Dropout of `inputs` (any shape and floating dtype) keyed by `seed`; unchanged without a seed or at p = 0."""
    if seed is None or probability == 0:
        return inputs
    return dropped(inputs, probability, row_bits([seed], inputs.shape[:-1].numel(), inputs.device))


def dropped(inputs: Tensor, probability: float, bits: Tensor) -> Tensor:
    """Dropout of `inputs` (..., width) with random bits (1, rows) of the rows."""
    (keep,) = keep_masks(bits, inputs.shape[-1], probability, torch.bool)
    return inputs.mul(keep.view(inputs.shape)).mul_(keep_scale(probability))


def draw_seed() -> int:
    """A seed from torch's default CPU generator, for forwards in training without a seed."""
    return int(torch.randint(1 << 62, ()))
