"""Documents that are tokenized: their encoding, pieces, special tokens."""

import json

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet

from cloze.pipeline.config import MaskingConfig, PrepareConfig, SourceConfig, SplitConfig, VocabularyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from cloze.pipeline.records import ROLES
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


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


def test_a_document_in_pieces_stays_in_train(tmp_path, monkeypatch):
    monkeypatch.setattr("cloze.pipeline.readers.lines.LONGEST_PIECE", 2000)
    long = " ".join(corpus.documents(100))
    path = corpus.write_jsonl(tmp_path / "a.jsonl", [long, *corpus.documents(60, seed=3, sentences=(1, 4))])
    split = SplitConfig(validation=0.25, test=0.25)
    manifest = prepare(corpus.config(tmp_path, [path], split=split))
    assert manifest.counts["documents_in_pieces"] == 1 and tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == manifest.counts["documents_read"] - 1 + -(-len(long) // 1990)


@pytest.mark.parametrize("strategy", ["whole_word", "span"])
def test_whole_words_of_a_tokenizer_without_words_are_refused(tmp_path, strategy):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(20))
    letters = VocabularyConfig(model="characters")
    train_vocabulary(PrepareConfig(input=[str(path)], output=str(tmp_path / "characters"), vocabulary=letters))
    pieces = [(name, -1.0) for name in [*corpus.NAMES.values(), "▁ka", "lo"]]
    Tokenizer(tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 1)), corpus.NAMES).save(tmp_path / "Unigram")
    bare = tokenizers.models.WordPiece(
        {name: number for number, name in enumerate([*corpus.NAMES.values(), *"abcdefghijklmnopqrstuvwxyz"])},
        unk_token=corpus.NAMES["unknown"],
        continuing_subword_prefix="",
    )
    Tokenizer(tokenizers.Tokenizer(bare), corpus.NAMES).save(tmp_path / "WordPiece without")
    masking = MaskingConfig(strategy=strategy)
    for kind in ("characters", "Unigram", "WordPiece without"):
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
