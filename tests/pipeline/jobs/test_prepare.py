"""The whole job: the same bytes for any workers, every token accounted for."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet

from cloze.pipeline.config import (
    MaskingConfig,
    MixtureSource,
    PrepareConfig,
    SamplesConfig,
    SourceConfig,
    SplitConfig,
    VocabularyConfig,
)
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from cloze.pipeline.records import ROLES
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.shards import ShardReader
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
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


def test_weights_repeat_documents(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        corpus.write_jsonl(tmp_path / f"in/{name}.jsonl", corpus.documents(200, seed=seed))
    mixture = [MixtureSource([str(tmp_path / "in/a.jsonl")], 2.0), MixtureSource([str(tmp_path / "in/b.jsonl")], 0.5)]
    manifest = prepare(corpus.config(tmp_path, [], input=[], mixture=mixture, split=SplitConfig(0.0, 0.0)))
    counts = manifest.splits["train"].counts
    assert counts["documents"] == 400 and 470 < counts["documents_with_copies"] < 530


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


def test_pairs_that_differ_in_where_they_are_divided_are_no_duplicates(tmp_path):
    lines = [
        line
        for word in corpus.words()[:60]
        for line in (f"ka {word} lo\tmi", f"ka {word}\tlo mi", f" ka  {word} lo \t mi")
    ]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "pairs.txt"], source=SourceConfig(format="pairs")))
    assert (manifest.counts["documents"], manifest.counts["documents_duplicate"]) == (120, 60)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_encoding_errors_are_counted_by_documents_and_not_by_pieces(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("cloze.pipeline.readers.lines.LONGEST_PIECE", 2000)
    monkeypatch.setattr("cloze.pipeline.readers.files.BLOCK_BYTES", 1000)
    texts = [text.replace('"', "") for text in corpus.documents(2, sentences=(60, 70))]
    good, bad = (" ".join(text.split()).encode() for text in texts)
    made = [bad.replace(b"ka", b"k\xff"), good.replace(b"ka", b"k\xff"), good, *[b"ka lo %d" % n for n in range(9)]]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.table({"text": pa.array(made).view(pa.string())}), path)
    elif suffix == "jsonl":
        path.write_bytes(b"".join(b'{"text": "' + text + b'"}\n' for text in made))
    else:
        path.write_bytes(b"\n\n".join(made))
    manifest = prepare(corpus.config(tmp_path, [path], source=SourceConfig(encoding_errors="replace")))
    assert manifest.counts["documents_read"] == len(made) and manifest.counts["documents_in_pieces"] == 3
    assert manifest.counts["documents_with_encoding_errors"] == 2


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


def test_a_document_in_pieces_stays_in_train(tmp_path, monkeypatch):
    monkeypatch.setattr("cloze.pipeline.readers.lines.LONGEST_PIECE", 2000)
    long = " ".join(corpus.documents(100))
    path = corpus.write_jsonl(tmp_path / "a.jsonl", [long, *corpus.documents(60, seed=3, sentences=(1, 4))])
    split = SplitConfig(validation=0.25, test=0.25)
    manifest = prepare(corpus.config(tmp_path, [path], split=split))
    assert manifest.counts["documents_in_pieces"] == 1 and tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == manifest.counts["documents_read"] - 1 + -(-len(long) // 1990)


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


@pytest.mark.parametrize("strategy", ["whole_word", "span"])
def test_whole_words_of_a_tokenizer_without_words_are_refused(tmp_path, strategy):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(20))
    letters = VocabularyConfig(model="characters")
    train_vocabulary(PrepareConfig(input=[str(path)], output=str(tmp_path / "characters"), vocabulary=letters))
    pieces = [(name, -1.0) for name in [*corpus.NAMES.values(), "▁ka", "lo"]]
    Tokenizer(tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 1)), corpus.NAMES).save(tmp_path / "Unigram")
    masking = MaskingConfig(strategy=strategy)
    for kind in ("characters", "Unigram"):
        config = corpus.config(tmp_path, [path], tokenizer=str(tmp_path / kind), masking=masking)
        with pytest.raises(UserError, match=f"masking.strategy: found {strategy} with a tokenizer of kind {kind}"):
            prepare(config)
    prepare(corpus.config(tmp_path, [path], masking=masking))


@pytest.mark.parametrize("model", ["wordpiece", "words", "bytes", "characters", "unigram"])
def test_literal_special_tokens_stay_text_up_to_the_shards(tmp_path, model):
    """Also with a vocabulary that was trained on them: special tokens stand where samples have them, and nowhere."""
    texts = [
        text.replace(" ka", " [MASK]", 3).replace(" ", " [SEP] ", 2).replace(". ", "[CLS]. [PAD][UNK] ", 1)
        for text in corpus.documents(60)
    ]
    assert all("[SEP]" in text for text in texts)
    path = corpus.write_jsonl(tmp_path / "a.jsonl", texts)
    vocabulary = VocabularyConfig(model=model, lowercase=False)
    train_vocabulary(PrepareConfig([str(path)], str(tmp_path / "vocab"), vocab_size=600, vocabulary=vocabulary))
    manifest = prepare(corpus.config(tmp_path, [path], tokenizer=str(tmp_path / "vocab"), split=SplitConfig(0, 0)))
    special = manifest.special_tokens
    reader = ShardReader(tmp_path / "data")
    samples, _ = reader.take(np.arange(reader.num_samples), None)
    expected = np.sort(
        np.concatenate(
            [
                samples.offsets[:-1],
                samples.offsets[:-1] + samples.segment_b_start - 1,
                (samples.offsets[1:] - 1)[samples.segment_b_start < samples.lengths],
            ]
        )
    )
    found = np.flatnonzero(np.isin(samples.input_ids, [i for i in special.ids if i != special.unknown]))
    assert np.array_equal(found, expected)


def test_names_that_stand_only_in_the_map_of_special_tokens(tmp_path):
    """As older libraries write it; the folder that is prepared holds no such map."""
    names = dict(zip(ROLES, ("<P>", "<U>", "<C>", "<S>", "<M>"), strict=True))
    vocabulary = {token: number for number, token in enumerate([*names.values(), "ka", "##lo"])}
    Tokenizer(wordpiece_backend(vocabulary, names, True, None), names).save(tmp_path / "old")
    config = json.loads((tmp_path / "old/tokenizer_config.json").read_text())
    named = {name: config.pop(name) for name in list(config) if name.endswith("_token")}
    (tmp_path / "old/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "old/special_tokens_map.json").write_text(json.dumps(named))
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(20))
    prepare(corpus.config(tmp_path, [path], tokenizer=str(tmp_path / "old")))
    copied = json.loads((tmp_path / "data/tokenizer/tokenizer_config.json").read_text())
    assert copied == config | named and Tokenizer.from_folder(tmp_path / "data/tokenizer").names == names


def test_sources_are_hashed_as_a_whole_or_by_the_pieces_that_tasks_read(tmp_path, monkeypatch):
    """docs/data-format.md, in plain Python."""
    monkeypatch.setattr("cloze.pipeline.readers._SEGMENT_BYTES", (5000, 5000))
    monkeypatch.setattr("cloze.pipeline.readers._STRIPE_BYTES", 3000)
    monkeypatch.setattr("cloze.pipeline.jobs.sources._AT_ONCE", 700)
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
