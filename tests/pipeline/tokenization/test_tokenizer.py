"""The word table gives the plain tokenizer's ids, whatever the text."""

import errno
import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from cloze.pipeline import ragged
from cloze.pipeline.config import MixtureSource, PrepareConfig, SourceConfig, VocabularyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from cloze.pipeline.readers import plan, read
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.sentences import SPLITTERS
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.byte_level import byte_tokenizer
from tests.pipeline import corpus
from tests.pipeline.families import family

ODD = [
    "\u0000",
    "\u000b",
    "\u000c",
    "\u001c",
    "\u001d",
    "\u001e",
    "\u001f",
    "\u0085",
    "\u00a0",
    "\u00ad",
    "\u200b",
    "\u200d",
    "\u2028",
    "\u2029",
    "\u202e",
    "\ufeff",
    "\ufffd",
    "\u0301",
    "\u0308",
    "\u0338",
    "é",
    "ß",
    "İ",
    "ı",
    "Σ",
    "ς",
    "ﬁ",
    "Å",
    "中",
    "文",
    "。",
    "、",
    "が",
    "カ\u3099",
    "한",
    "🙂",
    "👩\u200d👩",
    "🏳\ufe0f",
    "¿",
    "—",
    "\U0001f1e9",
    "…",
    "‰",
    "\u037e",
    "=",
    "≠",
    "`",
    "[MASK]",
    "[SEP]",
    "##",
    "a" * 101,
    "\u1e9b\u0323",
    "\ue000",
    "\U000e0001",
    "\U00020000",
    "▁",
    "´",
    "\ufdfa",
    "\u2e5d",
    "\u1b7d",
]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(ODD),
        st.sampled_from(["a", "KaLo", "ren", " ", "\n", "\t", ".", "-", "'"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
).map("".join)
KINDS = [(True, None), (True, False), (False, None), (False, True)]
TOKENIZERS = {kind: corpus.tokenizer(*kind, extra=("中", "é", "##é", "ß", "。", "がか")) for kind in KINDS}
TOKENIZERS["▁"] = family("Unigram")


def assert_same_ids(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids, offsets = tokenizer.encode_batch(texts)
    plain, plain_offsets = tokenizer.encode_plainly(texts)
    assert np.array_equal(offsets, plain_offsets)
    assert np.array_equal(ids, plain)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
def test_ids_are_the_plain_tokenizers(kind, texts):
    assert_same_ids(TOKENIZERS[kind], texts)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_odd_character_alone_between_letters_and_in_pairs(kind):
    texts = [f"{left}{odd}{right}" for odd in ODD for left in ("", "a", " ", ".") for right in ("", "b", " ", "\u0301")]
    texts += [first + second for first in ODD for second in ODD]
    assert_same_ids(TOKENIZERS[kind], texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_code_point(kind):
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    assert_same_ids(TOKENIZERS[kind], [f"a{chr(code)}b {chr(code)}" for code in codes])


def whole_words(normalizer=None, mark="") -> Tokenizer:
    """Whole words, split at white space alone: marks don't end them, so that 。 stands inside.

    mark: `▁`, which the pre-tokenizer puts before each word; the words without it are in the vocabulary too.
    """
    words = ["ka", "a", "b", "中", "文", "中。", "ren."]
    names = dict.fromkeys([*corpus.NAMES.values(), *words, *(mark + word for word in words)])
    backend = Backend(models.WordLevel({name: number for number, name in enumerate(names)}, corpus.NAMES["unknown"]))
    rules = [pre_tokenizers.WhitespaceSplit(), *([pre_tokenizers.Metaspace(prepend_scheme="always")] if mark else [])]
    backend.pre_tokenizer = pre_tokenizers.Sequence(rules) if mark else rules[0]
    if normalizer:
        backend.normalizer = normalizer
    return Tokenizer(backend, corpus.NAMES)


SENTENCE_TOKENIZERS = {
    **TOKENIZERS,
    "words": whole_words(),
    "words, lowercase": whole_words(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "words without control characters": whole_words(normalizers.BertNormalizer()),
    "words behind ▁": whole_words(mark="▁"),
}


def assert_same_sentences(tokenizer: Tokenizer, text: str, splitter: str) -> None:
    data = text.encode() + b"\n"
    bounds = ragged.union(SPLITTERS[splitter](data), np.array([0, len(data)]))
    sentences = [data[low:high].decode() for low, high in itertools.pairwise(bounds.tolist())]
    found, plain = tokenizer.encode_bytes(data, bounds), tokenizer.encode_plainly(sentences)
    assert np.array_equal(found[1], plain[1])
    assert np.array_equal(found[0], plain[0])


@pytest.mark.parametrize("kind", SENTENCE_TOKENIZERS)
@settings(max_examples=100)
@given(
    text=st.lists(
        st.one_of(st.sampled_from("\f\v。.！? \n\taK中”é"), st.sampled_from(["ka lo.", "Ren.", "\n\n\f", "mi", *ODD])),
        max_size=30,
    ).map("".join),
    splitter=st.sampled_from(sorted(SPLITTERS)),
)
def test_ids_of_sentences_are_the_plain_tokenizers(kind, text, splitter):
    """The tokenizer may leave a page break or a 。 inside a word, where the splitter has found a boundary."""
    assert_same_sentences(SENTENCE_TOKENIZERS[kind], text, splitter)


@pytest.mark.parametrize("kind", SENTENCE_TOKENIZERS)
@pytest.mark.parametrize("text", ["ka lo.\n\n\fmi ren. Tas u.", "Ka.\fMi", "Ka.\v \v\fMi", "中文。中！”中 ka"])
def test_sentences_behind_page_breaks_and_inside_words(kind, text):
    for splitter in SPLITTERS:
        assert_same_sentences(SENTENCE_TOKENIZERS[kind], text, splitter)


@pytest.mark.slow
@pytest.mark.skipif("CLOZE_TEXTS" not in os.environ, reason="CLOZE_TEXTS names no texts (CONTRIBUTING.md)")
@pytest.mark.parametrize("model", ["wordpiece", "words"])
def test_real_texts(tmp_path, model):
    """Cut into sentences as `cloze prepare` does, with a vocabulary trained on them."""
    mixture = [
        MixtureSource([path], source=SourceConfig(format="file" if path.endswith(".json") else "auto"))
        for path in os.environ["CLOZE_TEXTS"].split(os.pathsep)
    ]
    vocabulary = VocabularyConfig(model=model, alphabet=7000)
    config = PrepareConfig(output=str(tmp_path), mixture=mixture, vocabulary=vocabulary)
    tokenizer = train_vocabulary(config)
    documents = [document for task in plan(config)[1] for document in read(task)]
    assert documents
    for document in documents:
        assert_same_sentences(tokenizer, document.text.decode(), "rules")


def test_the_same_as_the_library_without_our_settings(tmp_path):
    """encode_plainly is ours too: compare with the saved file, loaded by the library alone, on harmless text."""
    tokenizer = corpus.tokenizer()
    tokenizer.save(tmp_path)
    texts = corpus.documents(20)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    expected = [item.ids for item in backend.encode_batch(texts, add_special_tokens=False)]
    ids, offsets = tokenizer.encode_batch(texts)
    assert [ids[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)] == expected


def test_literal_special_tokens_are_text():
    tokenizer = corpus.tokenizer()
    ids = tokenizer.encode("a [MASK] b [SEP] [PAD]")
    assert not set(ids) & set(tokenizer.special_tokens.ids)
    assert [tokenizer.tokens[i] for i in ids][1:4] == ["[", "m", "##a"]


def test_word_level_models_do_not_know_specials_in_text():
    backend = Backend(models.WordLevel({"<pad>": 0, "<unk>": 1, "<eos>": 2, "<sos>": 3, "<mask>": 4, "a": 5}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(
        zip(
            ("pad", "unknown", "separator", "classification", "mask"),
            ("<pad>", "<unk>", "<eos>", "<sos>", "<mask>"),
            strict=True,
        )
    )
    tokenizer = Tokenizer(backend, names)
    assert tokenizer.word_table
    assert tokenizer.encode("a <mask> <eos> a") == [5, 1, 1, 5]
    assert tokenizer.encode_plainly(["a <mask> <eos> a"])[0].tolist() == [5, 1, 1, 5]


def test_a_full_table_starts_anew(monkeypatch):
    tokenizer = corpus.tokenizer()
    texts = corpus.documents(5)
    expected = tokenizer.encode_plainly(texts)[0]
    monkeypatch.setattr("cloze.pipeline.tokenization.tokenizer._TABLE_WORDS", 10)
    for _ in range(3):
        assert np.array_equal(tokenizer.encode_batch(texts)[0], expected)


def test_a_table_is_bounded_in_letters_too(monkeypatch):
    """Words of 10,000 letters, all different, as text without white space has them."""
    tokenizer = corpus.tokenizer()
    monkeypatch.setattr("cloze.pipeline.tokenization.tokenizer._TABLE_LETTERS", 100_000)
    for turn in range(8):
        assert_same_ids(tokenizer, [f"kalo {'é' * 10_000}{turn}-{n} {'x' * 10_000}{turn}{n}" for n in range(5)])
        assert sum(len(str(key)) for key in tokenizer._words) <= 300_000


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(corpus.NAMES.values()), show_progress=False)
    backend.train_from_iterator(corpus.documents(5), trainer)
    return Tokenizer(backend, corpus.NAMES)


def test_the_table_is_off_by_name_where_words_do_not_decide():
    assert byte_level().word_table_reason == "model BPE"
    tokenizer = corpus.tokenizer()
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.normalizer = normalizers.NFKC()
    assert Tokenizer(backend, corpus.NAMES).word_table_reason == "normalizer NFKC"
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens(["ka lo"])
    assert "added tokens" in Tokenizer(backend, corpus.NAMES).word_table_reason
    assert_same_ids(Tokenizer(backend, corpus.NAMES), ["ka lo mi", "kalo"])


def test_fingerprint_survives_saving_and_sees_casing(tmp_path):
    tokenizer = corpus.tokenizer()
    tokenizer.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).fingerprint == tokenizer.fingerprint
    assert Tokenizer.from_folder(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint
    assert corpus.tokenizer(lowercase=False).fingerprint != tokenizer.fingerprint


def test_a_disk_that_fills_while_saving_leaves_no_tokenizer_without_its_configuration(tmp_path, monkeypatch):
    """Its special tokens, rules and class would be guessed."""

    def full(path, content):
        if path.name.endswith("tokenizer.json"):
            raise OSError(errno.ENOSPC, path.name)
        return write(path, content)

    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="tokenizer.json"):
        corpus.tokenizer().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer_config.json"]


def test_vocab_txt_keeps_its_ids(tmp_path):
    tokens = ["[PAD]", *(f"[unused{n}]" for n in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##m", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path / "vocab.txt")
    special = tokenizer.special_tokens
    assert (special.pad, special.unknown, special.classification, special.mask) == (0, 100, 101, 103)
    assert tokenizer.encode("Them.") == [104, 105, 106]
    tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved/vocab.txt").read_text(encoding="utf-8").split("\n")[:-1] == tokens


def test_a_vocab_txt_with_own_names_in_its_configuration(tmp_path):
    names = {"pad_token": "<P>", "unk_token": "<U>", "cls_token": "<C>", "sep_token": "<S>", "mask_token": "<M>"}
    (tmp_path / "vocab.txt").write_text("\n".join([*names.values(), "the"]) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).encode("The été") == [5, 1]


@pytest.mark.parametrize(
    ("mask", "form", "message"),
    [
        ("the", "vocab.txt", "'the' as the mask token, an ordinary word"),
        (".", "vocab.txt", "'.' as the mask token, an ordinary word"),
        ("the", "tokenizer.json", "'the' as the mask token, an ordinary word"),
        ("<ma\nsk>", "tokenizer.json", r"'<ma\\nsk>' as the mask token, expected a name without line breaks"),
        ("m" * 201, "vocab.txt", "m' as the mask token, of 201 letters, expected at most 200"),
        ("[UNK]", "vocab.txt", r"'\[UNK\]' as the unknown and the mask token, expected a mask of its own"),
        ("[SEP]", "tokenizer.json", r"'\[SEP\]' as the separator and the mask token, expected a mask of its own"),
        ("THE", "vocab.txt", None),  # no text becomes it: case is dropped
        ("the_mask", "vocab.txt", None),
    ],
)
def test_special_tokens_of_others_that_a_text_could_become(tmp_path, mask, form, message):
    """Of a text that has them as words nothing would be left there but the token of unknown words."""
    names = corpus.NAMES | {"mask": mask}
    tokens = [*dict.fromkeys(names.values()), "cat", "[MASK]", *(["the"] if mask == "THE" else [])]
    described = {"mask_token": mask, "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    if form == "vocab.txt":
        (tmp_path / form).write_text("\n".join(tokens) + "\n", encoding="utf-8")
    else:
        backend = wordpiece_backend({token: number for number, token in enumerate(tokens)}, names, True, None)
        backend.save(str(tmp_path / form))
    if message:
        with pytest.raises(UserError, match=message):
            Tokenizer.from_folder(tmp_path)
    else:
        assert Tokenizer.from_folder(tmp_path).special_tokens.mask == 4


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("named", ["BertJapaneseTokenizer", "EsmTokenizer", "BertweetTokenizer", "TokenizersBackend"])
def test_a_vocab_txt_of_a_class_that_reads_it_otherwise(tmp_path, file, named):
    """transformers cuts its texts by MeCab, by letters, or not at all: as BERT's each word would have other tokens."""
    (tmp_path / "vocab.txt").write_text("\n".join([*corpus.NAMES.values(), "the"]) + "\n", encoding="utf-8")
    (tmp_path / file).write_text(json.dumps({"tokenizer_class": named}), encoding="utf-8")
    for path in (tmp_path, tmp_path / "vocab.txt"):
        with pytest.raises(UserError, match=f"vocab.txt: found the tokenizer_class {named}, which does not"):
            Tokenizer.from_folder(path)
    (tmp_path / file).write_text(json.dumps({"tokenizer_class": "ElectraTokenizerFast"}), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).encode("the") == [5]


def test_the_vocab_txt_of_our_own_folder_is_read_where_it_is_a_wordpiece(tmp_path):
    corpus.tokenizer().save(tmp_path / "words")
    assert Tokenizer.from_folder(tmp_path / "words/vocab.txt").encode("Mr.") == corpus.tokenizer().encode("Mr.")
    byte_tokenizer(corpus.documents(3)).save(tmp_path / "bytes")
    with pytest.raises(UserError, match="vocab.txt: found the tokenizer_class PreTrainedTokenizerFast, which"):
        Tokenizer.from_folder(tmp_path / "bytes/vocab.txt")


def test_a_vocab_txt_beside_its_tokenizer_json_has_the_same_rules(tmp_path):
    """Those of accents stand in the other file alone."""
    names = corpus.NAMES
    listed = {token: number for number, token in enumerate([*names.values(), "café", "cafe"])}
    Tokenizer(wordpiece_backend(listed, names, True, False), names).save(tmp_path)
    whole, part = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(tmp_path / "vocab.txt")
    assert part.encode("Café cafe") == whole.encode("Café cafe") == [5, 6] and part.fingerprint == whole.fingerprint
    (tmp_path / "vocab.txt").write_text("\n".join([*names.values(), "cafe", "café"]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="vocab.txt: found the tokenizer_class"):
        Tokenizer.from_folder(tmp_path / "vocab.txt")


@pytest.mark.parametrize(("encoding", "found"), [("utf-8-sig", "a byte order mark"), ("utf-16-le", "NUL bytes")])
def test_a_vocab_txt_in_another_encoding(tmp_path, encoding, found):
    (tmp_path / "vocab.txt").write_text("\n".join([*corpus.NAMES.values(), "the"]) + "\n", encoding=encoding)
    with pytest.raises(UserError, match=f"vocab.txt: found {found}.*convert it"):
        Tokenizer.from_folder(tmp_path)


def test_a_cased_vocab_txt_keeps_case(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*corpus.NAMES.values(), "The", "the"]) + "\n", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).encode("The the") == [5, 6]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("vocab.txt", "[PAD]\nthe\n", "unknown '\\[UNK\\]'"),
        ("vocab.txt", "[PAD]\na\na\n", "'a' twice"),
        ("tokenizer.json", "{", "can't be read as a tokenizer"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (4_000_000_000, "found id 4000000000 of 'b' among 8 tokens, expected at most 1048576 ids without a token"),
        (5, "found id 5 of both 'a' and 'b'|found id 5 of both 'b' and 'a'"),
    ],
)
def test_ids_far_above_the_tokens_and_of_two_tokens_are_refused(tmp_path, number, message):
    """A table for 4e9 ids would take 16 GB."""
    names = [*corpus.tokenizer().names.values()]
    vocabulary = {token: each for each, token in enumerate([*names, "a", "##c"])}
    Backend(models.WordPiece(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["b"] = number  # the library would write one token an id
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("part", ["normalizer", "pre-tokenizer", "decoder"])
def test_a_rule_that_gives_up_on_a_text_is_a_line(tmp_path, part):
    """The library panics there, which is no Exception and would end a command with a traceback."""
    corpus.tokenizer().save(tmp_path)
    backend, pattern = Backend.from_file(str(tmp_path / "tokenizer.json")), Regex("(x+x+)+y")
    if part == "normalizer":
        backend.normalizer = normalizers.Replace(pattern, "")
    elif part == "pre-tokenizer":
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    else:
        backend.add_tokens(["x" * 40])
        backend.decoder = decoders.Replace(pattern, "")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = Tokenizer.from_folder(tmp_path), "x" * 40
    uses = (tokenizer.encode, tokenizer.normalize, lambda text: tokenizer.encode_with_offsets([text]))
    if part == "decoder":
        uses = (lambda text: tokenizer.decode([tokenizer.vocab_size - 1]),)
    for use in uses[:: 2 if part == "pre-tokenizer" else 1]:
        with pytest.raises(UserError, match=f"^{tmp_path}: found a rule that gives up on a text .*retry-limit"):
            use(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt"])
def test_a_file_of_three_gigabytes_without_content_is_refused_before_it_is_read(tmp_path, name):
    corpus.tokenizer().save(tmp_path)
    if name == "vocab.txt":
        (tmp_path / "tokenizer.json").unlink()
    os.truncate(tmp_path / name, 3 << 30)
    with pytest.raises(UserError, match=f"{tmp_path}/{name}: found 3,221,225,472 bytes, expected at most"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_that_draws_its_tokens_is_refused(tmp_path):
    """The same text would have other tokens at each reading, the same corpus other bytes."""
    family("byte-level BPE").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="found dropout 0.1, by which a text has other tokens each time, expected null"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_what_lies_in_the_place_of_its_file_is_named(tmp_path, make):
    """As the link of a hub's folder whose content was removed: its vocab.txt may have other words."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ncat\n")
    assert Tokenizer.from_folder(tmp_path).vocab_size == 6
    make(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="tokenizer.json: found no regular file, expected one of a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["BPE", "WordLevel", "Unigram"])
def test_a_model_without_a_token_for_the_unknown_is_refused(tmp_path, kind):
    """As one trained without special tokens, to which they were added: the library fails at the first unknown text."""
    names = [name for name in corpus.NAMES.values()]
    if kind == "Unigram":
        backend = Backend(models.Unigram([("a", -1.0), ("b", -1.0)], byte_fallback=True))
    else:
        arguments = ({"a": 0, "b": 1}, []) if kind == "BPE" else ({"a": 0, "b": 1},)
        backend = Backend(getattr(models, kind)(*arguments, unk_token=corpus.NAMES["unknown"]))
    backend.add_special_tokens(names)
    backend.save(str(tmp_path / "tokenizer.json"))
    found = "no unk_id of its Unigram model" if kind == "Unigram" else "no token for the model's unk_token"
    with pytest.raises(UserError, match=f"found {found}.*, expected .*; write .* in tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["bytes of an alphabet", "without rules", "bytes behind rules", "bytes as words"])
@pytest.mark.parametrize("unknown", ["[UNK]", None])
def test_a_model_of_bytes_needs_none_for_the_unknown_if_it_has_all_of_utf8(kind, unknown):
    """As one trained without ByteLevel.alphabet(), to which special tokens were added: the library fails at the first
    unknown byte, or leaves it out if no unk_token is named.
    """
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    if kind == "bytes as words":
        listed = [f"<0x{byte:02X}>" for byte in range(0x100) if byte not in never]
    else:
        listed = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(map(chr, never)))

    def made(words: list[str]) -> Tokenizer:
        numbers = {word: number for number, word in enumerate(words)}
        backend = Backend(models.BPE(numbers, [], unk_token=unknown, byte_fallback=kind == "bytes as words"))
        if kind != "bytes as words":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="without" not in kind)
        if kind == "bytes behind rules":
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), backend.pre_tokenizer])
        backend.add_special_tokens(list(corpus.NAMES.values()))
        return Tokenizer(backend, corpus.NAMES)

    whole, text = made(listed), "The Café, 北京 \U0001f600"
    assert not whole.leaves_out and len(whole.backend.encode(text, add_special_tokens=False).ids) == len(text.encode())
    if unknown is None:
        assert made(listed[1:]).leaves_out
    else:
        with pytest.raises(UserError, match="found no token for the model's unk_token '\\[UNK\\]', expected one of"):
            made(listed[1:])


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "WordLevel"])
def test_another_token_for_unknown_words_than_the_configuration_names_is_refused(kind):
    """Some libraries put the one for them, some the other."""
    words = [*corpus.NAMES.values(), "<unk>"]
    if kind == "Unigram":
        make = lambda unknown: models.Unigram([(word, -1.0) for word in words], words.index(unknown))  # noqa: E731
    else:
        make = lambda unknown: getattr(models, kind)(  # noqa: E731
            {word: number for number, word in enumerate(words)}, unk_token=unknown
        )
    assert Tokenizer(Backend(make("[UNK]")), corpus.NAMES).vocab_size == 6
    for other in ("[MASK]", "<unk>"):
        with pytest.raises(UserError, match=rf"found '{re.escape(other)}' in tokenizer.json .* expected '\[UNK\]'"):
            Tokenizer(Backend(make(other)), corpus.NAMES)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="cloze vocab"):
        Tokenizer.from_folder(tmp_path / "none")


def test_transformers_loads_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = corpus.tokenizer()
    tokenizer.save(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded("Kalo ren.", "mi")["input_ids"]
    special = tokenizer.special_tokens
    expected = [special.classification, *tokenizer.encode("Kalo ren."), special.separator]
    assert ids == [*expected, *tokenizer.encode("mi"), special.separator]
    assert loaded.mask_token == "[MASK]" and loaded.pad_token_id == 0
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["do_lower_case"] is True


def test_a_rule_that_gives_up_on_every_text_is_named(tmp_path):
    """As lengths of zero."""
    corpus.tokenizer().save(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=f"^{tmp_path}.*: (found a rule that gives up|can't be read as a tokenizer)"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
@pytest.mark.parametrize("given", [{"mask_token": [1]}, {"pad_token": {"lstrip": True}}, {"do_lower_case": "false"}])
def test_a_configuration_of_other_kinds_is_refused(tmp_path, name, given):
    corpus.tokenizer().save(tmp_path)
    (tmp_path / name).write_text(json.dumps(given))
    with pytest.raises(UserError, match=f"{name}: {next(iter(given))}: found .*, expected"):
        Tokenizer.from_folder(tmp_path)
