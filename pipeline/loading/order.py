"""The order of samples (of a rank: batches.py), a pure function of block sizes, longest sample, streams, seed, epoch.

Block sizes and longest sample come from the manifest. The order does not depend on rank, world size or batch size, and
a process computes only the part of the streams that it reads:

- The order is divided into S streams. Position p belongs to stream p mod S and is its number p div S, so a global batch
  of g·S samples has g consecutive samples of each stream.
- An epoch has as many positions as samples, from `Order.epoch_start` on; each sample has one of them.
- The epoch's blocks (record batches) are permuted and concatenated to a line, which is divided into S segments, one for
  each stream. A block on a boundary is read by both streams.
- A segment is divided at block boundaries into windows. The rows of a window are permuted so that any consecutive ones
  have a similar distribution of lengths: no rank waits long for one with long samples. This depends only on the lengths
  within the window.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

# Tokens of all streams' windows together if every sample had the maximum length; each window has at least a block.
# Enough for good shuffling, little memory (some 80 MB), and decoded before the first batch is needed.
WINDOW_TOKENS = 1 << 24
# With the maximum number of streams a window is one block, and a process that reads all streams holds 350 MB
# (BLOCK_TOKENS).
MOST_STREAMS = 1024
_STRATA = 64  # groups of like length in a window
_Number = TypeVar("_Number", int, np.ndarray)
_BLOCKS, _ROWS = 1, 2  # purposes, so that the two draws are independent


def _generator(seed: int, purpose: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, purpose, *key))))


def derived_seed(seed: int, *key: int) -> int:
    """A seed of its own for each key, 64 bits."""
    return int(np.random.SeedSequence((seed, *key)).generate_state(1, np.uint64)[0])


def first_from(position: int, stream: _Number, streams: int) -> _Number:
    """Number within one of `streams` streams of its first sample at `position` or later; for several (n,), (n,)."""
    return -((stream - position) // streams)


def choose_streams(batch_sizes: Sequence[int], world_size: int, sources: int = 1) -> int:
    """Number of streams for a run with these sizes of global batches (and increments): a divisor of all, so that every
    stream gives the same to every batch, and if possible a multiple of the world size, so that no stream is read by two
    ranks. With several sources there are fewer streams, since each stream holds a window per source.
    """
    common = math.gcd(*batch_sizes)
    most = max(MOST_STREAMS // sources, world_size)
    divisors = [number for number in range(1, min(common, most) + 1) if common % number == 0]
    return max(divisors, key=lambda number: (number % world_size == 0, number))


def row_order(num_rows: int, seed: int, epoch: int, window: int) -> np.ndarray:
    """A permutation of the rows of a window."""
    return _generator(seed, _ROWS, epoch, window).permutation(num_rows)


@functools.cache
def _spread(strata: int) -> np.ndarray:
    """Order of strata in which neighbours are far apart: numbers 0 … strata - 1 with reversed bits."""
    bits = max(1, (strata - 1).bit_length())
    return np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in range(strata)])


def window_order(lengths: np.ndarray, *key: int) -> np.ndarray:
    """The permutation of a window's rows from their lengths (N,).

    Rows are sorted by length (ties at random) and divided into strata, which then alternate.

    Args:
        key: seed, epoch, stream, number of the window.
    """
    generator = _generator(key[0], _ROWS, *key[1:])
    rows = generator.permutation(len(lengths))
    # 16-bit integers, which hold all lengths (segment_b_start has 16 bits too), are sorted by counting.
    rows = rows[np.argsort(lengths.astype(np.uint16)[rows], kind="stable")]
    strata = min(_STRATA, len(rows))
    stratum = np.arange(len(rows)) * strata // len(rows)
    rows = rows[np.argsort(stratum + generator.random(len(rows)), kind="stable")]  # random within each stratum
    sizes = np.bincount(stratum, minlength=strata)
    within = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[stratum]
    turns = 1 << max(1, (strata - 1).bit_length())
    turn = (_spread(strata) + generator.integers(turns)) % turns
    return rows[np.argsort((within + (turn[stratum] + 0.5) / turns) / sizes[stratum], kind="stable")]


@dataclass(frozen=True)
class WindowPlace:
    """A window of a stream: numbers [start, stop) of the stream. Its rows are the concatenated rows of `blocks`
    (numbered within their pair set) without the first `skip` ones.
    """

    epoch: int
    stream: int
    number: int
    start: int
    stop: int
    blocks: np.ndarray
    skip: int


class Order:
    """The order of an endless stream of samples.

    Args:
        block_sizes: number of samples of each block, for each pair set; epochs cycle through the pair sets.
    """

    def __init__(self, block_sizes: Sequence[np.ndarray], max_length: int, streams: int, seed: int):
        self.streams, self.seed = streams, seed
        self._block_sizes = block_sizes
        self._epoch_sizes = [int(sizes.sum()) for sizes in block_sizes]
        self._window_rows = max(1, WINDOW_TOKENS // (max_length * streams))
        self._lines: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def epoch_start(self, epoch: int) -> int:
        """Position of the epoch's first sample."""
        cycles, rest = divmod(epoch, len(self._epoch_sizes))
        return cycles * sum(self._epoch_sizes) + sum(self._epoch_sizes[:rest])

    def epoch_of(self, position: int) -> int:
        """The epoch of a position."""
        return int(self.epochs_of(np.array([position]))[0])

    def epochs_of(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of positions (n,), int64 (n,)."""
        ends = np.cumsum(self._epoch_sizes)
        cycles, rest = np.divmod(positions, ends[-1])
        return cycles * len(ends) + np.searchsorted(ends, rest, side="right")

    def first_from(self, position: int, stream: _Number) -> _Number:
        """As the function of this name, for these streams."""
        return first_from(position, stream, self.streams)

    def window(self, stream: int, number: int) -> WindowPlace:
        """The window with the sample of this number of a stream."""
        epoch = self.epoch_of(number * self.streams + stream)
        blocks, offsets, segments = self._line(epoch)
        first = self.first_from(self.epoch_start(epoch), stream)
        low, high = segments[stream : stream + 2].tolist()
        bounds = offsets[np.searchsorted(offsets, low, "right") : np.searchsorted(offsets, high, "left")]
        # A window ends at the first block boundary after each multiple of the intended number of rows.
        bounds = bounds[np.flatnonzero(np.diff((bounds - low) // self._window_rows, prepend=0))]
        place = low + number - first
        window = int(np.searchsorted(bounds, place, "right"))
        start = int(bounds[window - 1]) if window else low
        stop = int(bounds[window]) if window < len(bounds) else high
        some = np.searchsorted(offsets, start, "right") - 1
        after = np.searchsorted(offsets, stop, "left")
        return WindowPlace(
            epoch=epoch,
            stream=stream,
            number=window,
            start=first + start - low,
            stop=first + stop - low,
            blocks=blocks[some:after],
            skip=start - int(offsets[some]),
        )

    def _line(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch's blocks in their order, the offsets of the blocks (blocks + 1,), and the offsets of the streams'
        segments (streams + 1,).
        """
        if epoch not in self._lines:
            sizes = self._block_sizes[epoch % len(self._block_sizes)]
            blocks = _generator(self.seed, _BLOCKS, epoch).permutation(len(sizes))
            offsets = np.concatenate([[0], np.cumsum(sizes[blocks])])
            streams = np.arange(self.streams)
            counts = self.first_from(self.epoch_start(epoch + 1), streams)
            counts = counts - self.first_from(self.epoch_start(epoch), streams)
            self._lines = {key: line for key, line in self._lines.items() if key >= epoch - 1}
            self._lines[epoch] = blocks, offsets, np.concatenate([[0], np.cumsum(counts)])
        return self._lines[epoch]
