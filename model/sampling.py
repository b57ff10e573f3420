"""Sampling of tokens from scores, with keys per token that do not depend on the split of the batch.

All arithmetic of the sampling uses 64-bit integers that wrap, whose sums are the same in any order.
"""

import torch
from torch import Tensor

from cloze.model.attention import sequences_and_positions

_UNIT = 1 << 30  # represents a probability of 1; a probability below half of 1 / _UNIT becomes 0
# Scores processed at once, by whether the device is a GPU: as many as fit a CPU's caches.
_CHUNK_ELEMENTS = {False: 1 << 20, True: 1 << 25}


def _signed(number: int) -> int:
    """The int64 with the lowest 64 bits of a number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(bits: Tensor) -> Tensor:
    """splitmix64 of int64 of any shape, with logical shifts."""
    bits = bits + _STEP
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _FIRST
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _SECOND
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def token_bits(seed: int, tokens: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    """32 random bits for each position: int64 (M,), 0 to 2^32 - 1, a hash of (seed, all tokens of its sequence, its
    position in it), so a sequence is sampled in the same way in any batch.

    Args:
        seed: 0 to 2^63 - 1.
        tokens: (T,) int64, of concatenated sequences.
        offsets: (B + 1,) int32, where each begins.
        positions: (M,) int64, indices into T.
    """
    sequence, places = sequences_and_positions(len(tokens), offsets)
    keys = tokens.new_zeros(len(offsets) - 1).index_add(0, sequence, _mixed(_mixed(places) ^ tokens))
    chosen = _mixed(_mixed(keys[sequence[positions]] ^ seed) ^ places[positions])
    return chosen >> 32 & (1 << 32) - 1


def draw_tokens(scores: Tensor, bits: Tensor, temperature: float = 1.0) -> Tensor:
    """Sample one index for each row of `scores` (M, V) from the softmax in fp32 at a temperature: int64 (M,).

    The same probabilities and `bits` (M,) (`token_bits`) give the same index on any device: probabilities are rounded
    to multiples of 2^-30, whose sums are exact.
    """
    drawn = torch.empty_like(bits)
    size = max(1, _CHUNK_ELEMENTS[scores.is_cuda] // max(1, scores.shape[-1]))
    for start in range(0, len(scores), size):
        rows = slice(start, start + size)
        shares = (scores[rows].float() / temperature).softmax(-1)
        sums = (shares * _UNIT).round().long().cumsum(-1)
        wanted = bits[rows, None] * sums[:, -1:] >> 32  # below the total, which is about 2^30
        drawn[rows] = torch.searchsorted(sums, wanted, right=True)[:, 0]
    return drawn
