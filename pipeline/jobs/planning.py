"""The plan of splits and shards: ranges of document hashes, from the counts of stage 1."""

from dataclasses import dataclass

import numpy as np

from cloze.pipeline.config import PAIR_OBJECTIVES, PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.exchange_stage import END, Layout
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, Report
from cloze.pipeline.stores.places import Place

MIN_DOCUMENTS = 64  # minimum documents of a shard: a random segment B comes from another document of the same shard
# Maximum tokens of a shard, if more than twice the target: a worker holds a shard in memory, at 50 bytes per token, and
# has 1.5 GB. With longer documents a shard has fewer of them (books aren't that long); 8 of up to 3 MiB each always
# fit, unless weights repeat them.
_MOST_TOKENS = 24 << 20
_FEWEST_DOCUMENTS = 8
_PARTITION = END // PARTITIONS
_EXACTLY_BELOW = 4096  # number of documents with the lowest hashes that are read individually


class TooLittleText(UserError):
    """The input has too few documents: what was prepared of it is of no use to any command."""


@dataclass(frozen=True)
class Range:
    """A range of hashes low <= hash < high, and its approximate number of tokens."""

    low: int
    high: int
    tokens: int


def plan_splits(
    config: PrepareConfig, report: Report, layout: Layout, folder: Place
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Hash ranges of the splits, lowest hashes first, and remarks. A split that would be too small is enlarged.

    Args:
        report: total of stage 1.
        layout: of the parts in `folder`, after all rounds.

    Raises:
        TooLittleText: there is none, or for a pair objective fewer than two documents.
    """
    pairs = config.samples.objective in PAIR_OBJECTIVES
    needed = 2 if pairs else 1
    remarks, splits, low = [], {}, 0
    shares = {"validation": config.split.validation, "test": config.split.test}
    wanted = sum(share > 0 for share in shares.values())
    lowest, complete = _lowest_hashes(report, layout, folder, needed * (wanted + 1))
    total = int(report.documents.sum())
    if complete:  # duplicates are counted only now
        total = len(lowest)
    if total == 0:
        raise TooLittleText(
            "input: found no text in any document, expected some; look at --source.format and text_field"
        )
    if pairs and total < 2 and config.samples.random_share > 0 and config.samples.objective != "sentence_order":
        raise TooLittleText(
            f"samples.objective: found {total} document, expected at least 2 for {config.samples.objective}: a random "
            "segment B comes from another document; give more documents (of plain text a blank line ends one; with "
            "--source.format documents each line is one), or choose full_sentences"
        )
    for number, (split, share) in enumerate(shares.items()):
        high = low
        if share > 0:
            if total < needed * (wanted + 1):
                remarks.append(f"{split} is empty: {total} documents are too few to hold any out")
            else:
                high = low + int(share * END)
                first = int(np.searchsorted(lowest, np.uint64(low)))
                if first + needed <= len(lowest):  # minimum of this split
                    high = max(high, int(lowest[first + needed - 1]) + 1)
                if complete:  # and enough for the splits that follow
                    following = 1 + sum(later > 0 for later in list(shares.values())[number + 1 :])
                    high = min(high, int(lowest[total - needed * following]))
        splits[split] = (low, high)
        low = high
    splits["train"] = (low, END)
    return splits, remarks


def _lowest_hashes(report: Report, layout: Layout, folder: Place, count: int) -> tuple[np.ndarray, bool]:
    """The lowest distinct hashes, enough to fill small splits; and whether these are all."""
    through = np.cumsum(report.documents)
    # `count` distinct hashes are needed, and there may be duplicates: read more.
    last = int(np.searchsorted(through, min(max(_EXACTLY_BELOW, 16 * count), int(through[-1]))))
    high = (last + 1) * _PARTITION
    hashes = [parts.read_hashes(folder / name, high) for name in layout.covering(0, high)]
    return np.unique(np.concatenate(hashes or [np.empty(0, np.uint64)])), bool(through[last] == through[-1])


def _fewest(tokens: float, most: int) -> int:
    """Minimum number of documents of a shard with this number of tokens."""
    return MIN_DOCUMENTS if tokens <= most else _FEWEST_DOCUMENTS


def plan_shards(report: Report, low: int, high: int, target: int) -> list[Range]:
    """Divide a split into shards: neighbouring partitions are merged up to `target` tokens and 64 documents, larger
    partitions are divided; fewer documents if 64 have too many tokens. Depends only on counts and configuration.
    """
    most = max(_MOST_TOKENS, 2 * target)  # pieces are merged up to the target
    pieces = []
    for partition in range(low // _PARTITION, -(-high // _PARTITION)):
        start, stop = max(low, partition * _PARTITION), min(high, (partition + 1) * _PARTITION)
        share = (stop - start) / _PARTITION
        documents, tokens = report.documents[partition] * share, report.tokens[partition] * share
        count = 1
        while tokens / count > target and documents / (2 * count) >= _fewest(tokens / count, most):
            count *= 2
        for number in range(count):
            a = start + (stop - start) * number // count
            b = start + (stop - start) * (number + 1) // count
            pieces.append((a, b, documents / count, tokens / count))
    total = sum(piece[3] for piece in pieces)
    target = total / max(1, -(-total // target))  # shards of similar size
    ranges: list[Range] = []
    begin, documents, tokens = low, 0.0, 0.0
    for start, stop, more_documents, more_tokens in pieces:
        if tokens + more_tokens > most and documents >= _FEWEST_DOCUMENTS:
            ranges.append(Range(begin, start, int(tokens)))
            begin, documents, tokens = start, 0.0, 0.0
        documents, tokens = documents + more_documents, tokens + more_tokens
        if tokens >= target and documents >= MIN_DOCUMENTS:
            ranges.append(Range(begin, stop, int(tokens)))
            begin, documents, tokens = stop, 0.0, 0.0
    if begin < high:
        if ranges and documents < _fewest(ranges[-1].tokens + tokens, most):  # too few documents for a shard
            last = ranges.pop()
            ranges.append(Range(last.low, high, last.tokens + int(tokens)))
        else:
            ranges.append(Range(begin, high, int(tokens)))
    return ranges
