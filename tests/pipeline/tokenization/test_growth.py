"""Rules and templates of others' tokenizers that make gigabytes of a text, and honest ones beside them."""

import base64
import json
from itertools import chain, pairwise

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization import growth
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus


def _replacing(times, content, **pattern):
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


_BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}


def _map_of_sentencepiece(text):
    """One that makes nothing of anything, and has this text."""
    charsmap = base64.b64encode(b"\0\4\0\0" + bytes(1024) + text.encode() + b"\0").decode()
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


def _kind(name):
    return {"type": name}


def _chain(letters):
    """Each letter becomes the next one, twice."""
    return list(chain.from_iterable(_replacing(1, two * 2, String=one) for one, two in pairwise(letters)))


_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (_replacing(9, "aaaaaaaaaa", String="a"), "a"),  # a billion letters of one, by the library without a bound
        (_replacing(30, "a", Regex="(?=a)"), "a"),
        (_replacing(30, "a", String=""), "a"),
        ([{"type": "Sequence", "normalizers": _replacing(4, "aaaa", Regex="[a-z]")}] * 4, "b"),
        ([{"type": "Prepend", "prepend": "a" * 1000}], None),
        (_replacing(30, "a", Regex=r"a\K"), "a"),
        ([_kind("ByteLevel")] * 24, "é"),  # each doubles what is no ASCII
        ([{"type": "BertNormalizer", **_BERT}, *_replacing(1, "北", String=" ")] * 20, "北"),
        ([_kind("NFKD"), *(_replacing(1, "ﷺ", String=each)[0] for each in "صلىاعيهوسم")] * 8, "ﷺ"),
        ([{"type": "Nmt"}, *_replacing(1, "\u200b" * 60, String=" ")] * 5, "a b"),
        (_chain("abcdefghijklmnopqrstuvwxyz"), "a"),
        ([_map_of_sentencepiece("a" * 1001)], None),
        (_chain("zyxwvutsrqponmlkjihgfedcb"), "z"),
        ([*_replacing(1, "", Regex="[a-z]"), *_replacing(1, "aa", Regex=r"\p{Greek}"), *_chain(_ALPHABET)], "α"),
        ([_kind("NFC")] * 50_001, None),
        (_replacing(1, "e" * 1000, Regex="e"), None),
        (_replacing(1, "b" * 900, String="e"), "e" * 100_000),
    ],
)
def test_rules_that_make_endless_texts_of_short_ones_are_refused(tmp_path, monkeypatch, rules, text):
    """At the latest with such a text, before it takes all memory."""
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": rules}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if text is None:
        with pytest.raises(
            UserError, match=f"{tmp_path}/tokenizer.json: found .*(whose rules make more than|rules of)"
        ):
            Tokenizer.from_folder(tmp_path)
    else:
        monkeypatch.setattr(growth, "_MOST_LETTERS", 20_000)

        def read(how: str) -> None:
            tokenizer = Tokenizer.from_folder(tmp_path)
            getattr(tokenizer, how)(text if how in ("normalize", "encode") else [text])

        for how in ("normalize", "encode", "encode_plainly", "encode_with_offsets"):
            with pytest.raises(UserError, match="found a text that the tokenizer's normalizer makes [0-9,]* times as"):
                read(how)
        # the library applies the rules to these while it loads
        content["added_tokens"][0] |= {"content": text, "normalized": True}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="tokenizer.json: of its added tokens or a word: found a text"):
            Tokenizer.from_folder(tmp_path)


_PAD = {"pad_token": "<p>", "cleanup": True}
_BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_METASPACE = {"replacement": "▁", "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize(
    ("part", "name", "rule"),
    [
        ("pre_tokenizer", "pretokenizers", {"type": "ByteLevel", **_BYTES}),
        ("pre_tokenizer", "pretokenizers", {"type": "Metaspace", **_METASPACE}),
        ("decoder", "decoders", {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}),
        ("decoder", "decoders", {"type": "CTC", "word_delimiter_token": "", **_PAD}),
        ("decoder", "decoders", {"type": "BPEDecoder", "suffix": ""}),
        ("decoder", "decoders", {"type": "Fuse"}),
    ],
)
def test_rules_of_other_parts_that_do_so_are_refused(tmp_path, part, name, rule):
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for count, refused in ((2, False), (65, True)):
        content[part] = {"type": "Sequence", name: [rule] * count}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        if refused:
            with pytest.raises(UserError, match=f"found (a {part} whose rules make more than 16|.* 65 of a decoder)"):
                Tokenizer.from_folder(tmp_path)
        else:
            Tokenizer.from_folder(tmp_path)


_FOLDING = {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "œ": "oe", "…": "...", "ﬁ": "fi", "&": " and ", "<": " lt "}
_UNICODE = "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "Nmt", "StripAccents", "ByteLevel"
_USUAL = [{"type": "NFKC"}, {"type": "BertNormalizer", **_BERT}, {"type": "Lowercase"}]
_CLEANING = (r"^\s+", "<[^>]*>", r"(.)\1{3,}", r"\x61" * 40 + "(b)", r"(?:``|\'\')", r"\p{Zs}+", "[[:space:]]{2,}")


@pytest.mark.parametrize(
    "rules",
    [
        [*_replacing(1, "▁", String=" "), *_replacing(30, " ", Regex=" {2,}"), {"type": "Prepend", "prepend": "▁"}],
        [_replacing(1, to, String=letter)[0] for letter, to in _FOLDING.items()] * 3,
        [_replacing(1, "", Regex=pattern)[0] for pattern in _CLEANING] * 5,
        _replacing(1200, "  ", String="\n") + _replacing(1, "abcdefgh", String="xyz"),
        [_replacing(1, f" {pattern[:9]} ", Regex=pattern)[0] for pattern in _CLEANING[1:]] * 5,
        _replacing(40, " ", Regex=r"(?<=\d)(?=[A-Za-z])"),
        [_replacing(1, chr(0x4E00 + number), String=chr(0x6000 + number))[0] for number in range(2700)],
        [_replacing(1, f" pin{number} ", String=chr(0x6000 + number))[0] for number in range(2700)],
        [
            _replacing(1, f":a_face_with_a_name_of_sixty_letters_{number:024}:", String=chr(0x1F600 + number))[0]
            for number in range(80)
        ],
        [*map(_kind, ("Nmt", "NFD", "StripAccents")), _map_of_sentencepiece("a" * 33)],
    ],
)
def test_honest_rules_are_taken_however_many(tmp_path, rules):
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [*_USUAL, *rules]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).normalize("Cat").endswith("cat")


@pytest.mark.parametrize(
    "rule",
    [
        {"type": "Prepend", "prepend": "q " * 499},
        {"type": "Replace", "pattern": {"Regex": r"\A"}, "content": "q " * 499},
        {"type": "Replace", "pattern": {"Regex": r"\z"}, "content": "q " * 499},
    ],
    ids=["Prepend", "begin", "end"],
)
def test_what_a_rule_adds_to_each_text_is_counted_for_each(tmp_path, rule):
    """Not once for all of a batch: a hundred thousand lines of a letter were four gigabytes of tokens."""
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": rule}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.encode_batch(["a"] * 100)[0]) > 10_000
    with pytest.raises(UserError, match="found a text that the tokenizer's normalizer makes"):
        tokenizer.encode_batch(["a"] * 20_000)


@pytest.mark.parametrize(("kind", "most"), [(kind, growth._WIDEST.get(kind, 1)) for kind in _UNICODE])
def test_rules_of_unicode_make_no_more_of_a_letter_than_is_counted(kind, most):
    rule = {"type": kind} | (_BERT | {"strip_accents": True} if kind == "BertNormalizer" else {})
    normalizer = growth.without_vocabulary({"normalizer": rule}).normalizer
    letters = [chr(number) for number in range(0x33480) if not 0xD800 <= number < 0xE000]
    apart = normalizer.normalize_str("\ua000")
    made = normalizer.normalize_str("\ua000".join(letters)).split(apart)
    assert max(map(len, made)) == most


def test_a_field_that_comes_twice_is_refused(tmp_path):
    """The library takes the one that is not null, Python the last."""
    corpus.tokenizer().save(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.rstrip()[:-1] + ', "normalizer": null}')
    with pytest.raises(UserError, match="found the field 'normalizer' twice"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_with_a_token_that_it_has_no_id_of_is_refused(tmp_path, capfd):
    """Without the panic of the library, which it writes to the terminal itself."""
    corpus.tokenizer().save(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    del whole["post_processor"]["special_tokens"]["[SEP]"]
    in_sequence = {"type": "Sequence", "processors": [whole["post_processor"]]}
    for processor in (whole["post_processor"], in_sequence):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": processor}))
        with pytest.raises(
            UserError, match=r"found '\[SEP\]' in its post_processor, expected it among its special_tok"
        ):
            Tokenizer.from_folder(tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("form", ["single", "pair"])
@pytest.mark.parametrize("part", ["SpecialToken", "Sequence"])
def test_a_template_that_makes_texts_much_longer_is_refused(tmp_path, form, part):
    """Half a megabyte of it took seven gigabytes at the first text; a thousand times the text itself, all there are."""
    corpus.tokenizer().save(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    template = whole["post_processor"]
    template["special_tokens"]["[CLS]"] |= {"ids": [2] * 20, "tokens": ["[CLS]"] * 20}
    put = {"SpecialToken": {"id": "[CLS]", "type_id": 0}, "Sequence": {"id": "A", "type_id": 0}}[part]
    template[form] = [{part: put}] * (60 if part == "SpecialToken" else 8) + template[form]
    for processor in (template, {"type": "Sequence", "processors": [{"type": "Sequence", "processors": [template]}]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": processor}))
        with pytest.raises(UserError, match="found a post_processor that puts texts more than 8 times"):
            Tokenizer.from_folder(tmp_path)
    many = {
        "type": "Sequence",
        "processors": [{"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}] * 65,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": many}))
    with pytest.raises(UserError, match="found a post_processor that puts texts more than 8 times"):
        Tokenizer.from_folder(tmp_path)
