"""Between the stages: rounds in which tasks exchange documents, so that no task ever opens more than so many parts.

Stage 1 leaves parts that each have documents of all hashes; a shard needs those of a few hashes, from every part. That
is one open for each pair of part and shard, which is nothing for 10⁹ tokens and 5 × 10⁹ opens for 10¹². So, while more
than `FILES_AT_ONCE` parts hold any one hash, a round divides the hashes further: parts are taken in groups of at most
so many neighbours, and of each group as many new parts are made as it has, each with one of as many ranges of hashes.
A round costs every document one more reading and writing, and divides the parts that hold a hash by the limit: no
round up to some 15 × 10⁹ tokens, one up to 8 × 10¹². Which documents meet in a shard, and in which order, is decided
by their hashes alone, so that rounds can't be seen in the result.
"""

from dataclasses import dataclass

import numpy as np

from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.tokenize_stage import part_name
from cloze.pipeline.stores.places import to_place

FILES_AT_ONCE = 512  # a group of parts of 64 MiB has 32 GiB then, of which a task takes one part's worth
END = 1 << 64  # of the hashes


class Layout:
    """The parts after stage 1 and after each round, by arithmetic: nothing about them is stored.

    counts: parts of each task of stage 1. At level k (0: after stage 1, k: after round k) the hashes are divided into
    equal ranges, and each range is held by so many parts: `levels[k]` = (ranges, files). Parts are numbered, those of
    a range one after another.
    """

    def __init__(self, counts: np.ndarray, limit: int = FILES_AT_ONCE):
        self._counts = counts
        self.levels = [(1, int(counts.sum()))]
        while self.levels[-1][1] > limit:
            ranges, files = self.levels[-1]
            groups = -(-files // limit)
            self.levels.append((ranges * -(-files // groups), groups))
        self.names = [self._names(level) for level in range(len(self.levels))]

    @property
    def rounds(self) -> int:
        return len(self.levels) - 1

    def _names(self, level: int) -> list[str]:
        if level:
            ranges, files = self.levels[level]
            prefix = self.prefix(level)
            return [f"{prefix}{number:07d}-{file:04d}.part" for number in range(ranges) for file in range(files)]
        return [part_name(task, part) for task, count in enumerate(self._counts.tolist()) for part in range(count)]

    @staticmethod
    def prefix(level: int) -> str:
        """With which the names of a level's parts begin, and no others."""
        return f"round-{level}-" if level else "task-"

    def tasks(self, parts: list[int]) -> list[int]:
        """The tasks of stage 1 that make these parts of it."""
        return np.unique(np.searchsorted(np.cumsum(self._counts), parts, side="right")).tolist()

    def bounds(self, level: int, part: int) -> tuple[int, int]:
        """The hashes low <= hash < high that a part holds."""
        ranges, files = self.levels[level]
        number = part // files
        return number * END // ranges, (number + 1) * END // ranges

    def sources(self, level: int, part: int) -> range:
        """The parts of the level before from which a round makes this one."""
        (before, files), (ranges, groups) = self.levels[level - 1 : level + 1]
        number, group = divmod(part, groups)
        first = number // (ranges // before) * files
        return range(first + group * files // groups, first + (group + 1) * files // groups)

    def covering(self, low: int, high: int) -> list[str]:
        """The parts that hold low <= hash < high after the last round, by name."""
        ranges, files = self.levels[-1]
        first, last = ((value * ranges - 1) // END for value in (low + 1, high))
        return self.names[-1][first * files : (last + 1) * files]


@dataclass(frozen=True)
class ExchangeTask:
    """One part of a round: the documents with low <= hash < high of its sources. tokens: their dtype, by name."""

    folder: str
    name: str
    sources: list[str]
    low: int
    high: int
    tokens: str


def exchange(task: ExchangeTask) -> tuple[int, int]:
    """Run one task; documents and tokens of the part that it made."""
    folder, dtype = to_place(task.folder), np.dtype(task.tokens)
    tables = [parts.empty(dtype)]
    tables += parts.read_all(folder, task.sources, task.low, task.high, dtype)
    return parts.write(folder / task.name, parts.joined(tables))
