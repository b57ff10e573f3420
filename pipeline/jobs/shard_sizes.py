"""How large shards are: the division of a split into ranges of document hashes, from the counts of stage 1."""

from dataclasses import dataclass

from cloze.pipeline.jobs.exchange_stage import END
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, Report

MIN_DOCUMENTS = 64  # minimum documents of a shard: a random segment B comes from another document of the same shard
# Maximum tokens of a shard, if more than twice the target: a worker holds a shard in memory, at 50 bytes per token, and
# has 1.5 GB. With longer documents a shard has fewer of them (books aren't that long); 8 of up to 3 MiB each always
# fit, unless weights repeat them.
_MOST_TOKENS = 24 << 20
_FEWEST_DOCUMENTS = 8
PARTITION_SIZE = END // PARTITIONS  # number of hashes of a partition


@dataclass(frozen=True)
class Range:
    """A range of hashes low <= hash < high, and its approximate number of tokens."""

    low: int
    high: int
    tokens: int


def _fewest(tokens: float, most: int) -> int:
    """Minimum number of documents of a shard with this number of tokens."""
    return MIN_DOCUMENTS if tokens <= most else _FEWEST_DOCUMENTS


def plan_shards(report: Report, low: int, high: int, target: int) -> list[Range]:
    """Divide a split into shards: neighbouring partitions are merged up to `target` tokens and 64 documents, larger
    partitions are divided; fewer documents if 64 have too many tokens. Depends only on counts and configuration.
    """
    most = max(_MOST_TOKENS, 2 * target)  # pieces are merged up to the target
    pieces = []
    for partition in range(low // PARTITION_SIZE, -(-high // PARTITION_SIZE)):
        start, stop = max(low, partition * PARTITION_SIZE), min(high, (partition + 1) * PARTITION_SIZE)
        share = (stop - start) / PARTITION_SIZE
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
