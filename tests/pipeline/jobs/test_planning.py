"""What is refused before anything is read, and how documents become splits and shards."""

import random

import numpy as np
import pytest

from cloze.pipeline.config import SamplesConfig, SplitConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.executors import LocalExecutor, run_tasks
from cloze.pipeline.jobs.planning import plan_shards
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, Report
from tests.pipeline import corpus


def test_small_corpora(tmp_path):
    two = corpus.write_jsonl(tmp_path / "two.jsonl", corpus.documents(2))
    manifest = prepare(corpus.config(tmp_path, [two], output=str(tmp_path / "two")))
    assert not manifest.splits["validation"].shards and manifest.splits["train"].counts["documents"] == 2
    some = corpus.write_jsonl(tmp_path / "some.jsonl", corpus.documents(12))
    manifest = prepare(corpus.config(tmp_path, [some], output=str(tmp_path / "some"), split=SplitConfig(0.001, 0.0)))
    assert manifest.splits["validation"].counts["documents"] == 2
    six = corpus.write_jsonl(tmp_path / "six.jsonl", corpus.documents(6))
    for share in (0.01, 0.25):
        output = str(tmp_path / f"six-{share}")
        manifest = prepare(corpus.config(tmp_path, [six], output=output, split=SplitConfig(share, share)))
        assert all(split.counts["documents"] >= 2 for split in manifest.splits.values())
    one = corpus.write_jsonl(tmp_path / "one.jsonl", corpus.documents(1) * 3)
    with pytest.raises(UserError, match="found 1 document, expected at least 2"):
        prepare(corpus.config(tmp_path, [one], output=str(tmp_path / "one")))
    alone = SamplesConfig(objective="full_sentences")
    assert (
        prepare(corpus.config(tmp_path, [one], output=str(tmp_path / "alone"), samples=alone)).counts["documents"] == 1
    )


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


def test_tasks_are_made_as_they_are_needed(monkeypatch):
    """Heaviest first; never more than a few that have not ended, so that a million take no more than those."""
    monkeypatch.setattr("cloze.pipeline.jobs.executors._IN_FLIGHT", 3)
    made, ended = [], []

    def task(place: int) -> int:
        made.append(place)
        assert len(made) - len(ended) <= 3
        return -place

    def on_result(place: int, result: str) -> None:
        assert result == str(-place)
        ended.append(place)

    weights = [5, 1, 9, 5, 0, 7, 2, 2, 8, 3]
    run_tasks(LocalExecutor(1), str, task, weights, on_result)
    assert made == sorted(range(10), key=lambda place: -weights[place]) and sorted(ended) == list(range(10))
    run_tasks(LocalExecutor(1), str, task, [], on_result)


def test_single_sentences_of_some_documents_need_documents_of_their_own():
    within = {"objective": "full_sentences", "cross_documents": False}
    assert SamplesConfig(**within, single_share=0.3, pair_sets=2).pair_sets == 2
    for samples in ({"objective": "full_sentences"}, {"objective": "next_sentence", "cross_documents": False}):
        with pytest.raises(UserError, match="single_share: found 0.3, expected 0, unless"):
            SamplesConfig(**samples, single_share=0.3)
