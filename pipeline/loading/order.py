"""Which samples, in which order: pure functions of (block sizes, longest sample, number of streams, seed, epoch).

Block sizes and longest sample come from the manifest. No rank, world size or batch size enters, and what a process
works out of the order is in proportion to the streams that it reads:

- The order is divided into S streams. Position p belongs to stream p mod S and is its number p div S, so a global batch
  of g·S samples has g neighbours of each stream.
- An epoch is as many positions as it has samples, from `Order.epoch_start` on: each sample stands at one of them.
- The epoch's blocks (record batches), permuted, make a line, which is cut into S segments, one for each stream. A block
  on a cut is read by both neighbours.
- A segment is cut at block bounds into windows. The rows of one are permuted, and laid out so that any run of them has
  all lengths alike: no rank then waits long for one that drew long samples. Only a window's own lengths enter.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

# Of all streams' windows together, if every sample had the greatest length; each has at least a block. Shuffled well,
# held easily (some 80 MB), and decoded before a first batch is missed.
WINDOW_TOKENS = 1 << 24
# Without need for more a window is one block then, and a process that reads all streams holds 350 MB (BLOCK_TOKENS).
MOST_STREAMS = 1024
_STRATA = 64  # groups of like length in a window
_BLOCKS, _ROWS = 1, 2  # purposes that keep the two draws apart


def _generator(seed: int, purpose: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, purpose, *key))))


def choose_streams(batch_sizes: Sequence[int], world_size: int, sources: int = 1) -> int:
    """Streams for a run whose global batches have these sizes and what they grow by: a divisor of all, so that every
    stream gives as much to every batch, and if possible a multiple of the processes, so that none is read by two. Of
    several sources each stream holds a window: then there are fewer."""
    common = math.gcd(*batch_sizes)
    most = max(MOST_STREAMS // sources, world_size)
    divisors = [number for number in range(1, min(common, most) + 1) if common % number == 0]
    return max(divisors, key=lambda number: (number % world_size == 0, number))


def row_order(num_rows: int, seed: int, epoch: int, window: int) -> np.ndarray:
    """A permutation of some rows."""
    return _generator(seed, _ROWS, epoch, window).permutation(num_rows)


@functools.cache
def _spread(strata: int) -> np.ndarray:
    """Numbers 0 … strata - 1 by place, such that neighbouring places are far apart: their bits reversed."""
    bits = max(1, (strata - 1).bit_length())
    return np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in range(strata)])


def window_order(lengths: np.ndarray, *key: int) -> np.ndarray:
    """The permutation of a window's rows, given their lengths (N,); key: seed, epoch, stream, number of the window.

    Sorted by length (ties at random) they are cut into strata; these then take turns.
    """
    generator = _generator(key[0], _ROWS, *key[1:])
    rows = generator.permutation(len(lengths))
    # 16 bits, which all lengths fit (segment_b_start has no more), are sorted by counting.
    rows = rows[np.argsort(lengths.astype(np.uint16)[rows], kind="stable")]
    strata = min(_STRATA, len(rows))
    stratum = np.arange(len(rows)) * strata // len(rows)
    rows = rows[np.argsort(stratum + generator.random(len(rows)), kind="stable")]  # within each at random
    sizes = np.bincount(stratum, minlength=strata)
    within = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[stratum]
    turns = 1 << max(1, (strata - 1).bit_length())
    turn = (_spread(strata) + generator.integers(turns)) % turns
    return rows[np.argsort((within + (turn[stratum] + 0.5) / turns) / sizes[stratum], kind="stable")]


@dataclass(frozen=True)
class WindowPlace:
    """A window of a stream: numbers [start, stop) of the stream. Its rows are those of `blocks` (numbered within their
    pair set) one after another, without the first `skip` ones."""

    epoch: int
    stream: int
    number: int
    start: int
    stop: int
    blocks: np.ndarray
    skip: int


class Order:
    """The order of an endless stream of samples.

    block_sizes: samples of each block, for each pair set that epochs cycle through.
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
        cycles, rest = divmod(position, sum(self._epoch_sizes))
        for place, size in enumerate(self._epoch_sizes):
            if rest < size:
                return cycles * len(self._epoch_sizes) + place
            rest -= size
        raise AssertionError("unreachable: the rest is below the sum")

    def epochs_of(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of positions (n,), int64 (n,)."""
        ends = np.cumsum(self._epoch_sizes)
        cycles, rest = np.divmod(positions, ends[-1])
        return cycles * len(ends) + np.searchsorted(ends, rest, side="right")

    @overload
    def first_from(self, position: int, stream: int) -> int: ...
    @overload
    def first_from(self, position: int, stream: np.ndarray) -> np.ndarray: ...
    def first_from(self, position: int, stream: int | np.ndarray) -> int | np.ndarray:
        """The stream's number of its first sample at `position` or later; of several streams (n,), theirs (n,)."""
        return -((stream - position) // self.streams)

    def window(self, stream: int, number: int) -> WindowPlace:
        """The window that holds the sample of that number of a stream."""
        epoch = self.epoch_of(number * self.streams + stream)
        blocks, offsets, segments = self._line(epoch)
        first = self.first_from(self.epoch_start(epoch), stream)
        low, high = segments[stream : stream + 2].tolist()
        bounds = offsets[np.searchsorted(offsets, low, "right") : np.searchsorted(offsets, high, "left")]
        # A bound ends a window if it is the first one after another multiple of the rows that a window is to have.
        bounds = bounds[np.flatnonzero(np.diff((bounds - low) // self._window_rows, prepend=0))]
        place = low + number - first
        window = int(np.searchsorted(bounds, place, "right"))
        start = int(bounds[window - 1]) if window else low
        stop = int(bounds[window]) if window < len(bounds) else high
        some = np.searchsorted(offsets, start, "right") - 1
        after = np.searchsorted(offsets, stop, "left")
        return WindowPlace(
            epoch=epoch, stream=stream, number=window, start=first + start - low, stop=first + stop - low,
            blocks=blocks[some:after], skip=start - int(offsets[some]),
        )

    def _line(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch's blocks in their order, where each begins (one more than blocks), and where each stream's segment
        does (one more than streams)."""
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
