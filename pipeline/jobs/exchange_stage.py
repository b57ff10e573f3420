"""Rounds between the stages that regroup documents by hash, so that no task opens more than FILES_AT_ONCE parts.

Stage 1 writes parts with documents of all hashes; a shard needs those of a small range of hashes from every part. That
is one open per pair of part and shard: few for 10⁹ tokens, but 5 × 10⁹ opens for 10¹². Therefore, while more than
`FILES_AT_ONCE` parts hold any one hash, a round divides the hashes further: each group of at most that many
neighbouring parts becomes the same number of new parts, each with one range of hashes. A round reads and writes every
document once more, and divides the number of parts that hold a hash by the limit: no round up to some 15 × 10⁹ tokens,
one up to 8 × 10¹². The documents of a shard and their order depend only on their hashes, so rounds do not change the
result.
"""

from dataclasses import dataclass

import numpy as np

from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.tokenize_stage import part_name
from cloze.pipeline.stores.places import to_place

FILES_AT_ONCE = 512  # a group of 64-MiB parts then has 32 GiB, of which a task takes the size of one part
END = 1 << 64  # number of hashes


class ExchangeLayout:
    """The parts after stage 1 and after each round, computed by arithmetic; nothing about them is stored.

    At level k (0: after stage 1, k: after round k) the hashes are divided into equal ranges, each held by several
    parts: `levels[k]` = (ranges, files per range). Parts are numbered range by range.

    Args:
        counts: number of parts of each task of stage 1.
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
        """Prefix of the names of a level's parts, and of no others."""
        return f"round-{level}-" if level else "task-"

    def tasks(self, parts: list[int]) -> list[int]:
        """The tasks of stage 1 that make these of its parts."""
        return np.unique(np.searchsorted(np.cumsum(self._counts), parts, side="right")).tolist()

    def bounds(self, level: int, part: int) -> tuple[int, int]:
        """The range of hashes [low, high) of a part."""
        ranges, files = self.levels[level]
        number = part // files
        return number * END // ranges, (number + 1) * END // ranges

    def sources(self, level: int, part: int) -> range:
        """The parts of the previous level from which a round makes this one."""
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
    """A task of a round, which makes one part: the documents of its sources with low <= hash < high.

    Args:
        tokens: name of their dtype.
    """

    folder: str
    name: str
    sources: list[str]
    low: int
    high: int
    tokens: str


def exchange(task: ExchangeTask) -> tuple[int, int]:
    """Run one task.

    Returns:
        The number of documents and tokens of the part.
    """
    folder, dtype = to_place(task.folder), np.dtype(task.tokens)
    tables = [parts.empty(dtype)]
    tables += parts.read_all(folder, task.sources, task.low, task.high, dtype)
    return parts.write(folder / task.name, parts.joined(tables))
