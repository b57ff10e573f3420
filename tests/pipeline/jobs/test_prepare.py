"""The whole job: the same bytes for any workers, every token accounted for."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from cloze.pipeline.config import MixtureSource, SamplesConfig, SourceConfig, SplitConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


def test_workers_and_listing_do_not_change_a_byte(folder, undisturbed):
    manifest = Manifest.load(folder / "undisturbed")
    assert len(manifest.splits["train"].shards) >= 4
    inputs = [folder / "in" / f"part-{number}.jsonl.gz" for number in (3, 0, 4, 1, 2)]
    for workers in (2, 3):
        config = corpus.config(folder, inputs, output=str(folder / f"workers-{workers}"), workers=workers)
        prepare(config)
        assert corpus.contents(folder / f"workers-{workers}") == undisturbed


def test_no_token_is_lost_and_splits_share_no_document(folder, undisturbed):
    manifest = Manifest.load(folder / "undisturbed")
    assert tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == 500 and manifest.counts["documents_duplicate"] == 0
    documents = {}
    for split in ("train", "validation", "test"):
        reader = ShardReader(folder / "undisturbed", split)
        documents[split] = set(reader.take(np.arange(reader.num_samples), 0)[0].document.tolist())
    assert not documents["train"] & documents["validation"] and not documents["validation"] & documents["test"]
    assert sum(map(len, documents.values())) == 500
    assert 25 < len(documents["validation"]) < 75
    assert all(shard.samples for split in manifest.splits.values() for shard in split.shards)


def test_weights_repeat_documents(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        corpus.write_jsonl(tmp_path / f"in/{name}.jsonl", corpus.documents(200, seed=seed))
    mixture = [MixtureSource([str(tmp_path / "in/a.jsonl")], 2.0), MixtureSource([str(tmp_path / "in/b.jsonl")], 0.5)]
    manifest = prepare(corpus.config(tmp_path, [], input=[], mixture=mixture, split=SplitConfig(0.0, 0.0)))
    counts = manifest.splits["train"].counts
    assert counts["documents"] == 400 and 470 < counts["documents_with_copies"] < 530


def test_sources_of_several_forms_are_each_read_as_such(tmp_path):
    """Small files share tasks, but not with files of another form."""
    for name, text in (("lines.txt", "ka lo. mi\nren tas\n\nu vor\ne"), ("prose.txt", "ka lo. Mi\nren. Tas")):
        (tmp_path / name).write_text(text)
    mixture = [
        MixtureSource([str(tmp_path / "lines.txt")], 1.0, SourceConfig(format="lines")),
        MixtureSource([str(tmp_path / "prose.txt")]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1 << 20)
        alone = SamplesConfig(objective="single_sentences")
        manifest = prepare(
            corpus.config(tmp_path, [], input=[], mixture=mixture, samples=alone, split=SplitConfig(0, 0))
        )
    assert manifest.counts["sentences"] == 4 + 3 == manifest.splits["train"].counts["samples"]


def test_pairs_serve_other_objectives_too(tmp_path):
    (tmp_path / "pairs.txt").write_text(
        "".join(f"ka lo {word}\t{'' if n % 3 else word}\n" for n, word in enumerate(corpus.words()))
    )
    source = SourceConfig(format="pairs")
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "pairs.txt"], source=source))
    reader = ShardReader(tmp_path / "data")
    samples, _ = reader.take(np.arange(reader.num_samples), 0)
    assert tokens_lost(manifest) == 0
    assert (samples.lengths - samples.segment_b_start >= 2).all()  # B and its separator: no label without a B


def test_several_lengths_from_one_tokenization(tmp_path):
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(200))
    config = corpus.config(tmp_path, [path], more_lengths=[128])
    manifest = prepare(config)
    longer = Manifest.load(tmp_path / "data/length-128")
    assert (manifest.max_length, longer.max_length) == (64, 128)
    prepare(corpus.config(tmp_path, [path], max_length=128, output=str(tmp_path / "alone")))
    assert corpus.contents(tmp_path / "alone") == corpus.contents(tmp_path / "data/length-128")
    prepare(config)  # complete: nothing to do
    assert ShardReader(tmp_path / "data/length-128").take(np.arange(50), 0)[0].lengths.max() > 64
    for lost, found in (
        ("train/shard-00000.arrow", "shard-00000.arrow: found no such shard"),
        ("tokenizer/vocab.txt", "vocab.txt: found no such file"),
        ("manifest.json", r"is complete, but .*length-128/manifest.json is gone; restore it, or remove"),
    ):
        moved = (tmp_path / "data/length-128" / lost).rename(tmp_path / "lost")
        with pytest.raises(UserError, match=found):
            prepare(config)
        moved.rename(tmp_path / "data/length-128" / lost)
    with pytest.raises(UserError, match=r"not with more_lengths \[256\]; choose another --output or remove the folder"):
        prepare(corpus.config(tmp_path, [path], more_lengths=[128, 256]))


@pytest.mark.parametrize("objective", ["sentence_order", "full_sentences", "single_sentences"])
def test_objectives_lose_nothing(tmp_path, objective):
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(100))
    manifest = prepare(corpus.config(tmp_path, [path], samples=SamplesConfig(objective=objective)))
    assert tokens_lost(manifest) == 0 and manifest.objective == objective
    assert manifest.splits["train"].counts["tokens_borrowed"] == 0


def test_min_document_tokens(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", ["ka.", "", "   ", *corpus.documents(50, sentences=(5, 9))])
    manifest = prepare(corpus.config(tmp_path, [path], samples=SamplesConfig(min_document_tokens=10)))
    assert (manifest.counts["documents"], manifest.counts["documents_short"]) == (50, 1)
    assert manifest.counts["documents_empty"] == 2 and tokens_lost(manifest) == 0


def test_sources_are_hashed_as_a_whole_or_by_the_pieces_that_tasks_read(tmp_path, monkeypatch):
    """docs/data-format.md, in plain Python."""
    monkeypatch.setattr("cloze.pipeline.readers._SEGMENT_BYTES", (5000, 5000))
    monkeypatch.setattr("cloze.pipeline.readers._STRIPE_BYTES", 3000)
    monkeypatch.setattr("cloze.pipeline.jobs.source_hashes._AT_ONCE", 700)
    texts = corpus.documents(40)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("\n\n".join(texts))
    (tmp_path / "in/empty.txt").touch()
    corpus.write_jsonl(tmp_path / "in/b.jsonl", texts[:2])
    corpus.write_jsonl(tmp_path / "in/c.jsonl.gz", corpus.documents(60, seed=1))
    parquet.write_table(pa.table({"text": corpus.documents(60, seed=2)}), tmp_path / "in/d.parquet", row_group_size=20)
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "in/e.parquet")
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "in"]))
    pieces = {}
    for source in manifest.sources:
        content = (tmp_path / "in" / source["name"]).read_bytes()
        size = source.get("piece_bytes") or max(1, len(content))
        pieces[source["name"]] = [content[start : start + size] for start in range(0, len(content), size)] or [b""]
        digests = [hashlib.sha256(piece).digest() for piece in pieces[source["name"]]]
        expected = hashlib.sha256(b"".join(digests)).digest() if "piece_bytes" in source else digests[0]
        assert source["sha256"] == expected.hex() and source["bytes"] == len(content)
    assert len(pieces["a.txt"]) > 3 and len(pieces["c.jsonl.gz"]) > 1 and len(pieces["d.parquet"]) == 3
    assert [len(pieces[name]) for name in ("empty.txt", "b.jsonl", "e.parquet")] == [1, 1, 1]


def test_the_manifest_names_no_place(folder, undisturbed):
    text = (folder / "undisturbed/manifest.json").read_text()
    assert str(folder) not in text and "workers" not in text
    content = json.loads(text)
    assert [source["name"] for source in content["sources"]] == [f"part-{n}.jsonl.gz" for n in range(5)]
    assert all(len(source["sha256"]) == 64 for source in content["sources"])
