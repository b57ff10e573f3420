"""The order of a mixture: which source each position of the stream of samples has, and which of its samples.

Pure functions of (shares of the sources by phase, number of streams). The source of position p, which is number t of
stream l (order.py), follows from a point on a circle of R = `period` places, R a multiple of the S streams:

    point(t, l) = (a · t + (R / S) · (b · l mod S)) mod R       a, b: `_spreading` of R and S

A source owns as many consecutive places as it has samples among R. R positions from a multiple of S on have each point
once, so shares are exact there. For one number t the points of all streams are S evenly spaced ones: each source has
its share of a batch, within one sample per such row. A stream has all points within R of its numbers, well spread, and
neighbouring streams are far apart: each process has about the same share of every source.

Stream l of a mixture takes its samples of a source from stream l of the source's own order. The number of them before a
position follows from prefix counts of one period, so a seek costs O(number of phases).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Minimum period in samples, over which shares are exact: a share is a multiple of 1 / 65,536.
PERIOD = 1 << 16
_GOLDEN = (math.sqrt(5) - 1) / 2
_NEAR = 64  # numbers on each side of the golden section that are tried


@dataclass(frozen=True)
class Phase:
    """From position `begin` on, sources have these shares of the samples (relative weights)."""

    begin: int
    shares: tuple[float, ...]


@functools.cache
def _spreading(modulus: int) -> int:
    """A number coprime to the modulus whose multiples are well spread modulo it: near the golden section, and among
    those the one whose ratio to the modulus has the smallest partial quotients.
    """
    middle = round(_GOLDEN * modulus)
    near = range(max(1, middle - _NEAR), min(modulus, middle + _NEAR) + 1)  # all numbers if the modulus is small
    return min(
        (number for number in near if math.gcd(number, modulus) == 1),
        key=lambda number: (_greatest_quotient(modulus, number), abs(number - middle)),
    )


def _greatest_quotient(larger: int, smaller: int) -> int:
    """The largest partial quotient of the continued fraction of their ratio."""
    most = 0
    while smaller:
        quotient, rest = divmod(larger, smaller)
        most, larger, smaller = max(most, quotient), smaller, rest
    return most


def whole_counts(shares: Sequence[float], period: int) -> np.ndarray:
    """Samples of each source in a period, int64 (sources,): proportional to its share, at least 1 for a positive
    share.
    """
    exact = np.array(shares, np.float64) / sum(shares) * period
    counts = np.where(exact > 0, np.maximum(1, np.floor(exact)), 0).astype(np.int64)
    left = period - int(counts.sum())
    if left >= 0:
        counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    else:  # samples given to sources below 1 are taken from the largest source
        counts[np.argmax(counts)] += left
    return counts


class _Pattern:
    """The sources of a phase by the number of steps on the circle, and their prefix counts."""

    def __init__(self, shares: Sequence[float], streams: int, period: int):
        self.counts = whole_counts(shares, period)
        ends = np.cumsum(self.counts)
        step = _spreading(period)
        self.sources = np.searchsorted(ends, np.arange(period) * step % period, side="right").astype(np.int32)
        # Positions of each source in a period, ascending.
        self.places = [np.flatnonzero(self.sources == source) for source in range(len(shares))]
        points = period // streams * (np.arange(streams) * _spreading(streams) % streams)
        self.starts = points * pow(step, -1, period) % period  # steps after which each stream begins
        rows = period // streams  # number of rows (one number of all streams) until each point occurred once
        of_rows = self.sources[(np.arange(rows)[:, None] + self.starts) % period]
        by_row = np.bincount((of_rows + len(shares) * np.arange(rows)[:, None]).ravel(), minlength=rows * len(shares))
        self.before_row = np.concatenate(
            [np.zeros((1, len(shares)), np.int64), np.cumsum(by_row.reshape(rows, -1), axis=0)]
        )

    def before(self, streams: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Samples of each source before these numbers (counted from the phase's first) of streams: (n, sources)."""
        steps = self.starts[streams] + numbers
        turns, places = np.divmod(steps, len(self.sources))
        columns = [
            turns * count + np.searchsorted(at, places) - np.searchsorted(at, self.starts[streams])
            for at, count in zip(self.places, self.counts.tolist(), strict=True)
        ]
        return np.stack(columns, axis=1)

    def before_rows(self, rows: np.ndarray) -> np.ndarray:
        """Samples of each source in the first `rows` numbers of all streams: (n, sources)."""
        turns, rest = np.divmod(rows, len(self.before_row) - 1)
        return turns[:, None] * self.before_row[-1] + self.before_row[rest]

    def numbers(self, source: int, stream: int, count: np.ndarray) -> np.ndarray:
        """The numbers at which a stream has its samples number `count` (from 0) of a source whose share is not 0."""
        at, start = self.places[source], int(self.starts[stream])
        turns, place = np.divmod(count + int(np.searchsorted(at, start)), len(at))
        return turns * len(self.sources) + at[place] - start


class MixtureOrder:
    """The source of each number of each stream, and how many samples of each source come before.

    A phase begins at the first number of the streams at or after its `begin`.

    Args:
        phases: by position, the first from 0 on.
    """

    def __init__(self, phases: Sequence[Phase], streams: int):
        self.streams = streams
        self.num_sources = len(phases[0].shares)
        self.period = streams * -(-PERIOD // streams)
        self._begins = np.array([-(-phase.begin // streams) for phase in phases], np.int64)
        self._patterns = [_Pattern(phase.shares, streams, self.period) for phase in phases]
        # Samples of each source before each phase, per stream and in total.
        every = np.arange(streams)
        self._before = [np.zeros((streams, self.num_sources), np.int64)]
        self._before_all = [np.zeros(self.num_sources, np.int64)]
        for pattern, numbers in zip(self._patterns, np.diff(self._begins), strict=False):
            self._before.append(self._before[-1] + pattern.before(every, np.full(streams, numbers)))
            self._before_all.append(self._before_all[-1] + pattern.before_rows(numbers[None])[0])

    def _spans(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Divide numbers [first, first + count) by phase: (phase, first, stop), counted from the phase's first
        number.
        """
        last, spans = first + count, []
        for phase, begin in enumerate(self._begins.tolist()):
            end = int(self._begins[phase + 1]) if phase + 1 < len(self._begins) else last
            low, high = max(first, begin), min(last, end)
            if low < high:
                spans.append((phase, low - begin, high - begin))
        return spans

    def sources(self, streams: range, firsts: np.ndarray, count: int) -> np.ndarray:
        """Sources of `count` numbers of each of these streams from its first on: (streams, count)."""
        sources = np.empty((len(streams), count), np.int32)
        every, bounds = np.array(streams), np.append(self._begins, np.iinfo(np.int64).max)
        for first in np.unique(firsts).tolist():  # at most two: the first numbers of a batch are equal or differ by one
            rows = np.flatnonzero(firsts == first)
            for phase, low, high in self._spans(first, count):
                pattern, begin = self._patterns[phase], int(bounds[phase])
                steps = pattern.starts[every[rows], None] + np.arange(low, high)
                sources[rows, low + begin - first : high + begin - first] = pattern.sources[steps % self.period]
        return sources

    def before(self, streams: range, numbers: np.ndarray) -> np.ndarray:
        """Samples of each source that each of these streams has before its number: int64 (streams, sources)."""
        every = np.array(streams)
        consumed = np.empty((len(streams), self.num_sources), np.int64)
        phases = np.searchsorted(self._begins, numbers, side="right") - 1
        for phase in np.unique(phases).tolist():
            rows = phases == phase
            here = self._patterns[phase].before(every[rows], numbers[rows] - self._begins[phase])
            consumed[rows] = self._before[phase][every[rows]] + here
        return consumed

    def consumed(self, positions: np.ndarray) -> np.ndarray:
        """Samples of each source before these positions, (n,) -> int64 (n, sources); positions are rounded down to
        multiples of the number of streams.
        """
        rows = positions // self.streams
        consumed = np.empty((len(rows), self.num_sources), np.int64)
        phases = np.searchsorted(self._begins, rows, side="right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            consumed[here] = self._before_all[phase] + self._patterns[phase].before_rows(
                rows[here] - self._begins[phase]
            )
        return consumed

    def positions(self, source: int, stream: int, counts: np.ndarray) -> np.ndarray:
        """Positions at which a stream has its samples number `counts` (ascending, from 0) of a source; the largest
        int64 for those that no phase reaches.
        """
        positions = np.full(len(counts), np.iinfo(np.int64).max)
        for phase, pattern in enumerate(self._patterns):
            low = int(self._before[phase][stream, source])
            last = phase + 1 == len(self._patterns)
            high = np.inf if last else int(self._before[phase + 1][stream, source])
            here = (counts >= low) & (counts < high)
            if pattern.counts[source] and here.any():
                numbers = self._begins[phase] + pattern.numbers(source, stream, counts[here] - low)
                positions[here] = numbers * self.streams + stream
        return positions
