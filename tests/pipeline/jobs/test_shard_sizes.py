"""How documents of a split become shards."""

import random

import numpy as np
import pytest

from cloze.pipeline.jobs.shard_sizes import plan_shards
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, Report


def test_shards_have_64_documents_and_like_sizes():
    report = Report()
    rng = random.Random(0)
    report.documents += np.array([rng.randint(0, 40) for _ in range(PARTITIONS)])
    report.tokens += report.documents * 1000
    end = 1 << 64
    ranges = plan_shards(report, 0, end, 100_000)
    assert [r.low for r in ranges] == [0, *(r.high for r in ranges[:-1])] and ranges[-1].high == end
    assert min(r.tokens for r in ranges) >= 64_000 and max(r.tokens for r in ranges) < 250_000
    crowded = Report(documents=np.full(PARTITIONS, 4000), tokens=np.full(PARTITIONS, 4_000_000))
    ranges = plan_shards(crowded, 0, end, 1_000_000)
    assert max(r.tokens for r in ranges) <= 1_000_000 and len(ranges) >= 4 * PARTITIONS


@pytest.mark.parametrize("documents", [1, 20, 126])
def test_long_documents_do_not_make_shards_without_bound(documents):
    """The pieces of a text of GBs, in the upper half as they are, with a token a byte."""
    report = Report()
    report.documents[PARTITIONS // 2 :] = documents
    report.tokens[PARTITIONS // 2 :] = documents << 20
    ranges = plan_shards(report, 0, 1 << 64, 1 << 21)
    assert [r.low for r in ranges] == [0, *(r.high for r in ranges[:-1])] and ranges[-1].high == 1 << 64
    assert sum(r.tokens for r in ranges) == report.tokens.sum()
    assert 8 << 20 <= min(r.tokens for r in ranges) and max(r.tokens for r in ranges) <= 24 << 20
