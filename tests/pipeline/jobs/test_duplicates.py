"""Which documents are dropped as duplicates, in the whole job."""

import numpy as np
import pytest

from cloze.pipeline.config import SourceConfig, SplitConfig
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


def test_duplicates_are_dropped_wherever_they_lie(tmp_path):
    texts = corpus.documents(80)
    corpus.write_jsonl(tmp_path / "in/a.jsonl", texts)
    corpus.write_jsonl(tmp_path / "in/b.jsonl", [text.replace(" ", "  \n") for text in texts[:30]] + texts[:5])
    source = SourceConfig(id_field="id")
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "in"], source=source))
    assert manifest.counts["documents"] == 80 and manifest.counts["documents_duplicate"] == 35
    assert manifest.counts["documents_read"] == 115 and tokens_lost(manifest) == 0
    alone = prepare(corpus.config(tmp_path, [tmp_path / "in/a.jsonl"], source=source, output=str(tmp_path / "alone")))
    # The first in the order of the source stays, so that nothing of b is there.
    assert [s.sha256 for s in alone.splits["train"].shards] == [s.sha256 for s in manifest.splits["train"].shards]


def test_pairs_that_differ_in_where_they_are_divided_are_no_duplicates(tmp_path):
    lines = [
        line
        for word in corpus.words()[:60]
        for line in (f"ka {word} lo\tmi", f"ka {word}\tlo mi", f" ka  {word} lo \t mi")
    ]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "pairs.txt"], source=SourceConfig(format="pairs")))
    assert (manifest.counts["documents"], manifest.counts["documents_duplicate"]) == (120, 60)


def test_pieces_of_one_document_are_no_duplicates_of_each_other(tmp_path, monkeypatch):
    """A long document whose pieces are alike loses none of them, a copy of it is dropped, and they spread."""
    monkeypatch.setattr("cloze.pipeline.readers.lines.LONGEST_PIECE", 2000)
    line = "ka lo mi ren tas u vor e shi dan. "
    alike = (line * 2000)[: 2000 * 40]  # the cuts fall on places of the line that repeat themselves
    others = corpus.documents(60, sentences=(1, 4))
    sizes = {}
    for name, texts in (("once", [alike, *others]), ("twice", [alike, *others, alike])):
        path = corpus.write_jsonl(tmp_path / f"{name}.jsonl", texts)
        output = tmp_path / f"data-{name}"
        manifest = prepare(corpus.config(tmp_path, [path], output=str(output), split=SplitConfig(0, 0)))
        assert manifest.counts["documents_in_pieces"] == len(texts) - 60 and tokens_lost(manifest) == 0
        sizes[name] = manifest.splits["train"].counts["tokens_kept"]
        assert (manifest.counts["tokens_duplicate"] > 0) == (name == "twice")
    tokens = Tokenizer.from_folder(tmp_path / "tokenizer")
    whole = sum(
        len(tokens.encode_bytes(text.encode(), np.array([0, len(text.encode())]))[0]) for text in [alike, *others]
    )
    assert sizes["once"] == sizes["twice"] == whole
    reader = ShardReader(tmp_path / "data-once")
    repeated = reader.take(np.arange(reader.num_samples), None)[0].document
    assert len(set(repeated[repeated >> 63 == 1].tolist())) > 30
