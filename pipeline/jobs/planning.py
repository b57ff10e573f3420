"""The plan of splits and shards: ranges of document hashes, from the counts of stage 1."""

from dataclasses import dataclass

import numpy as np

from cloze.pipeline.config import PAIR_OBJECTIVES, PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.exchange_stage import END, Layout
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, Report
from cloze.pipeline.stores.places import Place

MIN_DOCUMENTS = 64  # of a shard: a random segment B comes from another document of the same shard
# Tokens of a shard, or twice those that it aims at: a worker holds it, 50 bytes a token, and has 1.5 GB. Above, long
# documents are fewer in a shard (books aren't so long); 8 always fit, of up to 3 MiB each, unless weights repeat them.
_MOST_TOKENS = 24 << 20
_FEWEST_DOCUMENTS = 8
_PARTITION = END // PARTITIONS
_EXACTLY_BELOW = 4096  # documents: so many of the lowest hashes are looked at one by one


@dataclass(frozen=True)
class Range:
    """Documents with low <= hash < high, and about how many tokens they have."""

    low: int
    high: int
    tokens: int


def plan_splits(
    config: PrepareConfig, report: Report, layout: Layout, folder: Place
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Hash ranges of the splits, lowest hashes first, and remarks. A share that would be too small is filled up.

    report: the sum of stage 1. layout: of the parts in `folder`, of which the rounds must have been run.

    Raises UserError for a pair objective on a corpus in which no document has a partner.
    """
    pairs = config.samples.objective in PAIR_OBJECTIVES
    needed = 2 if pairs else 1
    remarks, splits, low = [], {}, 0
    shares = {"validation": config.split.validation, "test": config.split.test}
    wanted = sum(share > 0 for share in shares.values())
    lowest, complete = _lowest_hashes(report, layout, folder, needed * (wanted + 1))
    total = int(report.documents.sum())
    if complete:  # duplicates are known
        total = len(lowest)
    if total == 0:
        raise UserError("input: found no text in any document, expected some; look at --source.format and text_field")
    if pairs and total < 2 and config.samples.random_share > 0 and config.samples.objective != "sentence_order":
        raise UserError(
            f"samples.objective: found {total} document, expected at least 2 for {config.samples.objective}: a random "
            "segment B comes from another document; give more documents, or choose full_sentences"
        )
    for number, (split, share) in enumerate(shares.items()):
        high = low
        if share > 0:
            if total < needed * (wanted + 1):
                remarks.append(f"{split} is empty: {total} documents are too few to hold any out")
            else:
                high = low + int(share * END)
                first = int(np.searchsorted(lowest, np.uint64(low)))
                if first + needed <= len(lowest):  # at least so many
                    high = max(high, int(lowest[first + needed - 1]) + 1)
                if complete:  # and as many for each split that follows
                    following = 1 + sum(later > 0 for later in list(shares.values())[number + 1 :])
                    high = min(high, int(lowest[total - needed * following]))
        splits[split] = (low, high)
        low = high
    splits["train"] = (low, END)
    return splits, remarks


def _lowest_hashes(report: Report, layout: Layout, folder: Place, count: int) -> tuple[np.ndarray, bool]:
    """The lowest hashes, each once, enough of them to fill small splits; and whether these are all there are."""
    through = np.cumsum(report.documents)
    # `count` distinct ones are wanted, and duplicates may stand before them: read a good deal more.
    last = int(np.searchsorted(through, min(max(_EXACTLY_BELOW, 16 * count), int(through[-1]))))
    high = (last + 1) * _PARTITION
    found = [parts.read_hashes(folder / name, high) for name in layout.covering(0, high)]
    return np.unique(np.concatenate(found or [np.empty(0, np.uint64)])), bool(through[last] == through[-1])


def _fewest(tokens: float, most: int) -> int:
    """Documents that a shard must have, if it would have so many tokens."""
    return MIN_DOCUMENTS if tokens <= most else _FEWEST_DOCUMENTS


def plan_shards(report: Report, low: int, high: int, target: int) -> list[Range]:
    """Cut a split into shards: neighbouring partitions merged up to `target` tokens and 64 documents, a partition of
    more than that divided; fewer documents where 64 have too many tokens. Depends on counts and configuration alone."""
    most = max(_MOST_TOKENS, 2 * target)  # pieces of the target's size are merged up to there
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
    target = total / max(1, -(-total // target))  # shards of like size
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
        if ranges and documents < _fewest(ranges[-1].tokens + tokens, most):  # too few for a shard of their own
            last = ranges.pop()
            ranges.append(Range(last.low, high, last.tokens + int(tokens)))
        else:
            ranges.append(Range(begin, high, int(tokens)))
    return ranges
