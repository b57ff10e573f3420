"""Samples of a shard: their partners, copies, counts."""

import numpy as np
import pytest

from cloze.pipeline.config import MixtureSource, SamplesConfig, SplitConfig
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


def test_counts_agree_with_the_shards(folder, undisturbed):
    manifest = Manifest.load(folder / "undisturbed")
    for name, split in manifest.splits.items():
        reader = ShardReader(folder / "undisturbed", name)
        samples, masks = reader.take(np.arange(reader.num_samples), 0)
        assert split.counts["samples"] == len(samples) == sum(split.length_histogram)
        assert split.counts["tokens"] == len(samples.input_ids)
        assert split.counts["masked"] == len(masks.ids)
        assert split.counts["pairs_random"] == int((samples.next_sentence_label == 1).sum())
        assert np.array_equal(np.bincount(samples.lengths, minlength=65), split.length_histogram)
    train = ShardReader(folder / "undisturbed")
    ids = train.take(np.arange(train.num_samples), 0)[0].input_ids
    shares = np.bincount(ids[ids >= 5]) / (ids >= 5).sum()
    shares = shares[shares > 0]
    assert manifest.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)


def test_random_partners_come_from_the_same_shard_and_another_document(folder, undisturbed):
    """Found again by content: the tokens of B stand in another document of the shard, and not in that of A."""
    reader = ShardReader(folder / "undisturbed")
    bounds = np.cumsum([0, *(shard.samples for shard in reader.shards)])
    assert len(bounds) > 4
    labels = []
    for first, after in zip(bounds[:-1], bounds[1:], strict=True):
        samples, _ = reader.take(np.arange(first, after), None)
        labels += samples.next_sentence_label.tolist()
        texts, partners = {}, []  # each document's own tokens, which its samples hold in their order
        columns = (samples.document, samples.segment_b_start, samples.next_sentence_label)
        for row, document, start, label in zip(corpus.rows(samples), *map(np.ndarray.tolist, columns), strict=True):
            a, b = (" " + "".join(f"{each} " for each in ids) for ids in (row[1 : start - 1], row[start:-1]))
            texts[document] = texts.get(document, " ") + a[1:] + (b[1:] if label != 1 else "")
            partners += [(document, b)] if label == 1 else []
        for document, tokens in partners:
            assert any(tokens in text for other, text in texts.items() if other != document)
            # Some few tokens may stand in both.
            assert tokens.count(" ") < 12 or tokens not in texts[document]
        assert sum(tokens.count(" ") >= 12 for _, tokens in partners) > 20
    assert 0.4 < np.mean(np.array(labels) == 1) < 0.6


def test_copies_of_a_document_do_not_meet_in_a_sample(tmp_path):
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", sorted(set(corpus.documents(150, sentences=(1, 1)))))
    mixture = [MixtureSource([str(path)], 3.0)]
    samples = SamplesConfig(objective="full_sentences")
    manifest = prepare(corpus.config(tmp_path, [], input=[], mixture=mixture, samples=samples, split=SplitConfig(0, 0)))
    counts = manifest.splits["train"].counts
    assert counts["documents_with_copies"] == 3 * counts["documents"] and tokens_lost(manifest) == 0
    reader = ShardReader(tmp_path / "data")
    separator = str(manifest.special_tokens.separator)
    for row in corpus.rows(reader.take(np.arange(reader.num_samples), None)[0]):
        sentences = " ".join(map(str, row[1:-1])).split(f" {separator} ")
        assert len(set(sentences)) == len(sentences)
