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
    "rules",
    [
        _replacing(9, "aaaaaaaaaa", String="a"),  # a billion letters of one, by the library without a bound
        _replacing(30, "a", Regex="(?=a)"),
        _replacing(30, "a", String=""),
        [{"type": "Sequence", "normalizers": _replacing(3, "aaaa", Regex="[a-z]")}] * 3,
        [{"type": "Prepend", "prepend": "a" * 10**6}],
        _replacing(30, "a", Regex=r"a\K"),
        _replacing(30, "a", Regex=r"\y"),
        _replacing(30, "a", Regex="()"),
        [{"type": "ByteLevel"}] * 12,  # each doubles what is no ASCII
        [{"type": "BertNormalizer", **_BERT}, *_replacing(1, "北", String=" ")] * 20,
        [{"type": "NFKD"}, *(_replacing(1, "ﷺ", String=each)[0] for each in "صلىاعيهوسم")] * 8,
        _chain("abcdefghijklm"),
        [_map_of_sentencepiece("a" * 1001)],
        [_map_of_sentencepiece("zz\0" + "longer\0" * 20)] * 26,
        [*_replacing(1, "", Regex="[a-z]"), *_replacing(1, "aa", Regex=r"\p{Greek}"), *_chain(_ALPHABET)],
        [{"type": "Lowercase"}, *_replacing(1, "AA", Regex=r"\p{Greek}"), *_chain(_ALPHABET.upper())],
        [*_replacing(1, "é" * 40, String="è"), {"type": "NFC"}, *_replacing(1, "ab" * 40, String="é")],
        [*_replacing(1, "e\N{COMBINING ACUTE TONE MARK}" * 99, String="x"), {"type": "NFKC"}, *_chain("éabcdef")],
        [*_replacing(1, "y" * 1000, String="x"), *_replacing(1, "", String="x" * 200_000), *_chain("yzab")],
        [*_replacing(1, "\u200b" * 60, String=" "), {"type": "Nmt"}] * 5,
        [{"type": "NFC"}] * 100_000 + _chain(_ALPHABET),
    ],
)
def test_rules_that_make_endless_texts_of_short_ones_are_refused(tmp_path, rules):
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": rules}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=f"{tmp_path}/tokenizer.json: found a normalizer whose rules can make more than"
    ):
        Tokenizer.from_folder(tmp_path)
    content["normalizer"] = None
    metaspace = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    for part, kind, rule in (
        ("pre_tokenizer", "pretokenizers", {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}),
        ("pre_tokenizer", "pretokenizers", {"type": "Metaspace"} | metaspace),
        ("decoder", "decoders", {"pattern": {"String": "a"}, "content": "aa"}),
    ):
        each = {"type": "ByteLevel" if part == "pre_tokenizer" else "Replace"} | rule
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {part: {"type": "Sequence", kind: [each] * 12}}))
        with pytest.raises(UserError, match="whose rules can make more than"):
            Tokenizer.from_folder(tmp_path)
    content["normalizer"], pad = None, {"pad_token": "<p>", "cleanup": True}
    for decoder in (pad | {"type": "CTC", "word_delimiter_token": ""}, {"type": "BPEDecoder", "suffix": ""}):
        content["decoder"] = {"type": "Sequence", "decoders": [decoder] * 31}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="found a decoder whose rules can make more than"):
            Tokenizer.from_folder(tmp_path)


_FOLDING = {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "œ": "oe", "…": "...", "ﬁ": "fi", "&": " and ", "<": " lt "}
_USUAL = [{"type": "NFKC"}, {"type": "BertNormalizer", **_BERT}, {"type": "Lowercase"}]
_CLEANING = (r"^\s+", "<[^>]*>", r"(.)\1{3,}", r"\x61" * 40 + "(b)", r"(?:``|\'\')", r"\p{Zs}+", "[[:space:]]{2,}")


@pytest.mark.parametrize(
    "rules",
    [
        [*_replacing(1, "▁", String=" "), *_replacing(30, " ", Regex=" {2,}"), {"type": "Prepend", "prepend": "▁"}],
        [_replacing(1, to, String=letter)[0] for letter, to in _FOLDING.items()] * 3,
        [_replacing(1, "", Regex=pattern)[0] for pattern in _CLEANING] * 5,
        [_replacing(1, " ", Regex=pattern)[0] for pattern in _CLEANING[1:]] * 5,
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


def test_rules_of_unicode_make_no_more_of_a_letter_than_is_counted():
    for kind, most in growth._WIDEST.items():
        rule = json.dumps({"type": kind} | (_BERT | {"strip_accents": True} if kind == "BertNormalizer" else {}))
        assert max(map(len, growth._changed(rule).values())) == most, kind


_TAKE = (
    r"\s+ [^\S\n]{2,} \p{Zs} (a|b)+ (?<n>a)?b \ba [[:space:]]+ a+? ``|'' { (?i:ab) [\]] (.)\1{3,} (((a))) \x61".split()
)
_MAY_NOT = (
    r"a* a? (?=a) a\K \y () (a|) a|b* [[:space:]]* []a]* a{0,3} a{,3} a{3,0} a{2}? a+* \x61* (?:(?:a*)b?)+ "
    r"(?<=a)(?=b) (a a) (?~a) \10 ^$ (?x:a)"
)


@pytest.mark.parametrize(
    ("pattern", "takes"), [*((each, True) for each in _TAKE), *((each, False) for each in ("", *_MAY_NOT.split()))]
)
def test_a_regex_that_may_match_nothing_is_known(pattern, takes):
    assert growth.takes_letters(pattern) == takes


def test_a_long_text_that_grows_is_refused_before_it_takes_all_memory(tmp_path):
    """And a tokenizer whose added tokens are such texts; that a long one with letters that grow little is read."""
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = _replacing(1, "b" * 900, String="e")[0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.normalize("e")) == 900 and len(tokenizer.normalize("a" * 200_000)) == 200_000
    for read in (tokenizer.normalize, tokenizer.encode, lambda text: tokenizer.encode_with_offsets([text] * 2)):
        with pytest.raises(UserError, match="makes 900 times as many letters"):
            read("e" * 100_000)
    added = {"id": 9, "content": "e" * 200_000, "normalized": True}
    content["added_tokens"][0] |= added
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="found added tokens of 200,0.. letters, expected words"):
        Tokenizer.from_folder(tmp_path)


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
