"""How documents become splits, and which samples need documents of their own."""

import pytest

from cloze.pipeline.config import SamplesConfig, SplitConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
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


def test_single_sentences_of_some_documents_need_documents_of_their_own():
    within = {"objective": "full_sentences", "cross_documents": False}
    assert SamplesConfig(**within, single_share=0.3, pair_sets=2).pair_sets == 2
    for samples in ({"objective": "full_sentences"}, {"objective": "next_sentence", "cross_documents": False}):
        with pytest.raises(UserError, match="single_share: found 0.3, expected 0, unless"):
            SamplesConfig(**samples, single_share=0.3)
