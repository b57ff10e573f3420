"""Rules and templates of others' tokenizers that make gigabytes of a text, and honest ones beside them."""

import base64
import json
from itertools import pairwise

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus


def _replacing(times, content, **pattern):
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


_BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}


def _map_of_sentencepiece(text):
    """One that makes nothing of anything, and has this text."""
    return base64.b64encode(b"\4\0\0\0" + bytes(4) + text.encode() + b"\0").decode()


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
        [{"type": "Replace", "pattern": {"String": one}, "content": two * 2} for one, two in pairwise("abcdefghijklm")],
        [{"type": "Precompiled", "precompiled_charsmap": _map_of_sentencepiece("a" * 1001)}],
    ],
)
def test_rules_that_make_endless_texts_of_short_ones_are_refused(tmp_path, rules):
    corpus.tokenizer().save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": rules}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{tmp_path}/tokenizer.json: found a normalizer whose rules make more than"):
        Tokenizer.from_folder(tmp_path)
    content["normalizer"] = None
    for part, kind, rule in (
        ("pre_tokenizer", "pretokenizers", {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}),
        ("decoder", "decoders", {"pattern": {"String": "a"}, "content": "aa"}),
    ):
        each = {"type": "ByteLevel" if part == "pre_tokenizer" else "Replace"} | rule
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {part: {"type": "Sequence", kind: [each] * 12}}))
        with pytest.raises(UserError, match="whose rules make more than"):
            Tokenizer.from_folder(tmp_path)
    usual = [*_replacing(1, "▁", String=" "), *_replacing(9, " ", Regex=" {2,}"), {"type": "Prepend", "prepend": "▁"}]
    usual += [_replacing(1, f"{letter}e", String=letter)[0] for letter in "äöüßœæøåéèêëàùçñ"]
    usual += [
        _replacing(1, "", Regex=pattern)[0] for pattern in (r"^\s+", "<[^>]*>", r"(.)\1{3,}", r"\x61" * 40 + "(b)")
    ] * 5
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "NFKC"}, {"type": "BertNormalizer", **_BERT}, *usual],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
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
