"""Between the stages: rounds in which tasks exchange documents, so that no task ever opens more than so many parts.

Stage 1 leaves parts that each have documents of all hashes; a shard needs those of a few hashes, from every part. That
is one open for each pair of part and shard, which is nothing for 10⁹ tokens and 5 × 10⁹ opens for 10¹². So, while more
than `FILES_AT_ONCE` parts hold any one hash, a round divides the hashes further: parts are taken in groups of at most
so many neighbours, and of each group as many new parts are made as it has, each with one of as many ranges of hashes.
A round costs every document one more reading and writing, and divides the parts that hold a hash by the limit: no
round up to some 15 × 10⁹ tokens, one up to 8 × 10¹². Which documents meet in a shard, and in which order, is decided
by their hashes alone, so that rounds can't be seen in the result.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.tokenize_stage import part_name

FILES_AT_ONCE = 512  # a group of parts of 64 MiB has 32 GiB then, of which a task takes one part's worth
END = 1 << 64  # of the hashes


@dataclass(frozen=True)
class Part:
    """One part: after round `level` (0: of stage 1) number `file` of those that hold the range `range` of hashes."""

    level: int
    range: int
    file: int


class Layout:
    """The parts after stage 1 and after each round, by arithmetic: nobody needs to look, and nothing is stored.

    counts: parts of each task of stage 1. After level k there are `levels[k]` = (ranges, files): the hashes are divided
    into so many equal ranges, and each range is held by so many parts.
    """

    def __init__(self, counts: np.ndarray, limit: int = FILES_AT_ONCE):
        self._offsets = ragged.to_offsets(counts)
        self.levels = [(1, int(self._offsets[-1]))]
        while self.levels[-1][1] > limit:
            ranges, files = self.levels[-1]
            groups = -(-files // limit)
            self.levels.append((ranges * -(-files // groups), groups))

    @property
    def rounds(self) -> int:
        return len(self.levels) - 1

    def count(self, level: int) -> int:
        """Parts of a level."""
        ranges, files = self.levels[level]
        return ranges * files

    def parts(self, level: int) -> Iterator[Part]:
        ranges, files = self.levels[level]
        return (Part(level, number, file) for number in range(ranges) for file in range(files))

    def name(self, part: Part) -> str:
        if part.level:
            return f"{self.prefix(part.level)}{part.range:07d}-{part.file:04d}.part"
        task = self.task(part)
        return part_name(task, part.file - int(self._offsets[task]))

    @staticmethod
    def prefix(level: int) -> str:
        """With which the names of a level's parts begin, and no others."""
        return f"round-{level}-" if level else "task-"

    def task(self, part: Part) -> int:
        """The task of stage 1 that made a part."""
        return int(np.searchsorted(self._offsets, part.file, side="right")) - 1

    def bounds(self, part: Part) -> tuple[int, int]:
        """The hashes low <= hash < high that a part holds."""
        ranges = self.levels[part.level][0]
        return part.range * END // ranges, (part.range + 1) * END // ranges

    def sources(self, part: Part) -> list[Part]:
        """The parts of the level before from which a round makes this one."""
        (_, files), (_, groups) = self.levels[part.level - 1 : part.level + 1]
        group = range(part.file * files // groups, (part.file + 1) * files // groups)
        return [Part(part.level - 1, part.range // self._fan(part.level), file) for file in group]

    def all_sources(self, made: Iterable[Part]) -> list[Part]:
        """The parts of the level before from which a round makes these."""
        groups = {(part.range // self._fan(part.level), part.file): part for part in made}  # which share their sources
        return [source for part in groups.values() for source in self.sources(part)]

    def _fan(self, level: int) -> int:
        """Ranges that a round makes of one."""
        return self.levels[level][0] // self.levels[level - 1][0]

    def covering(self, low: int, high: int) -> list[str]:
        """The parts that hold low <= hash < high after the last round, by name."""
        ranges, files = self.levels[-1]
        first, last = ((value * ranges - 1) // END for value in (low + 1, high))
        held = (Part(self.rounds, number, file) for number in range(first, last + 1) for file in range(files))
        return [self.name(part) for part in held]


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
    folder, dtype = Path(task.folder), np.dtype(task.tokens)
    tables = [parts.empty(dtype)]
    for name in task.sources:
        tables += parts.read(folder / name, task.low, task.high, dtype)
    return parts.write(folder / task.name, parts.joined(tables))
