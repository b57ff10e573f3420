"""Which samples, in which order: pure functions of (block sizes, longest sample, seed, epoch).

The first two come from the manifest, so the order is a function of (manifest, seed, epoch) alone: no rank, world size
or batch size enters. Blocks (record batches) are permuted, then rows within a window of some 16 million tokens, so that
reading stays mostly sequential while neighbours in an epoch come from far apart.
"""

from collections.abc import Sequence

import numpy as np

# Of a window, if every sample had the greatest length: 32 blocks at 128, 8 at 512. Shuffled well, held easily (some
# 80 MB), and decoded before a first batch is missed.
WINDOW_TOKENS = 1 << 24
_BLOCKS, _ROWS = 1, 2  # purposes that keep the two draws apart


def _generator(seed: int, purpose: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, purpose, *key))))


def locate(position: int, epoch_sizes: Sequence[int]) -> tuple[int, int]:
    """Position in the endless stream -> (epoch, offset in it).

    Epochs cycle through `epoch_sizes`: one number, or one for each pair set.
    """
    cycles, rest = divmod(position, sum(epoch_sizes))
    for place, size in enumerate(epoch_sizes):
        if rest < size:
            return cycles * len(epoch_sizes) + place, rest
        rest -= size
    raise AssertionError("unreachable: the rest is below the sum")


def block_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    """The epoch's permutation of the blocks."""
    return _generator(seed, _BLOCKS, epoch).permutation(num_blocks)


def row_order(num_rows: int, seed: int, epoch: int, window: int) -> np.ndarray:
    """The permutation of the rows of one window of one epoch."""
    return _generator(seed, _ROWS, epoch, window).permutation(num_rows)


def epoch_windows(
    block_sizes: np.ndarray, max_length: int, seed: int, epoch: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """The epoch's windows: the blocks of each, and the offset of each in the epoch (one more than windows)."""
    order = block_order(len(block_sizes), seed, epoch)
    sizes = block_sizes[order]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    window = offsets[:-1] // max(1, WINDOW_TOKENS // max_length)
    cuts = np.flatnonzero(np.diff(window)) + 1
    return np.split(order, cuts), offsets[[0, *cuts, len(order)]]
