"""Whether the rules of a tokenizer.json make texts much longer than they are, found out before any text meets them.

The library has no bound: twenty rules that double a letter make a million of it, in one call that takes all memory.
"""

import base64
import json
from collections.abc import Iterator

import tokenizers

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# Characters that all rules together may make of one, and each by itself: NFKC makes 18 of U+FDFA, SentencePiece's maps
# 33 bytes.
_MOST_GROWTH = 1000
_MOST_BYTE_LEVELS = 4  # each makes a character of each byte, of which one that is no ASCII has two at least
_MOST_TRIES = 1_000_000  # of a rule on a piece of text: some seconds. Transliterations have some hundred rules.
# Of the same text and of ids of special tokens in a template; released tokenizers have it once, and up to a dozen.
_MOST_TEXTS, _MOST_PUT = 8, 1000
_MOST_PROCESSORS = 64  # released tokenizers have one or two
# Letters of every kind that a rule of Unicode makes longer, and usual ones.
_PIECES = "aA0 .\n\t▁éÉİßﬁ…北한ﷺ"
_LONGEST_TEXTS = 20  # of a map of SentencePiece; honest ones have thousands


def check_growth(backend: tokenizers.Tokenizer, where: object) -> None:
    """Raise UserError for rules of a normalizer, pre-tokenizer or decoder that make more than a thousand characters of
    one. What rules make of each other's letters is tried, on these letters alone.
    """
    normalizers = list(_rules(backend.normalizer, "normalizers"))
    replacing = [rule for rule in _rules(backend.decoder, "decoders") if rule["type"] == "Replace"]
    before = list(_rules(backend.pre_tokenizer, "pretokenizers"))
    byte_levels = sum(rule["type"] == "ByteLevel" for rule in (*normalizers, *before))
    for name, rules in (("normalizer", normalizers), ("decoder", replacing)):
        if byte_levels > _MOST_BYTE_LEVELS or max(map(_longest, rules), default=0) > _MOST_GROWTH or _grow(rules):
            raise UserError(
                f"{where}: found a {name} whose rules make more than {_MOST_GROWTH:,} characters of one, expected "
                "rules that leave a text about as long as it is; correct their content"
            )


def check_template(backend: tokenizers.Tokenizer, where: object) -> None:
    """Raise UserError for a post-processor that puts a special token around texts of which it has no id: the library
    panics at the first text, and writes that to the terminal itself. And for one that makes texts much longer.
    """
    processors = list(_rules(backend.post_processor, "processors"))
    templates = [each for each in processors if each["type"] == "TemplateProcessing"]
    for each in templates:
        put = {part["SpecialToken"]["id"] for part in each["single"] + each["pair"] if "SpecialToken" in part}
        if lacking := sorted(put - each["special_tokens"].keys()):
            raise UserError(
                f"{where}: found {lacking[0]!r} in its post_processor, expected it among its special_tokens; correct it"
            )
    for form in ("single", "pair"):
        texts, special = 1, 0
        for each in templates:
            ids = {name: len(token["ids"]) for name, token in each["special_tokens"].items()}
            texts *= max(1, sum("Sequence" in part for part in each[form]))
            special += sum(ids[part["SpecialToken"]["id"]] for part in each[form] if "SpecialToken" in part)
        if texts > _MOST_TEXTS or texts * special > _MOST_PUT or len(processors) > _MOST_PROCESSORS:
            raise UserError(
                f"{where}: found a post_processor that puts texts more than {_MOST_TEXTS} times, or more than "
                f"{_MOST_PUT:,} special tokens around one, expected some before and after it; correct its template"
            )


def _rules(part: object, name: str) -> Iterator[Fields]:
    """The rules of a part of a tokenizer, one after the other, as tokenizer.json describes them.

    Args:
        name: of the list of rules in a sequence.
    """
    waiting: list[Fields] = [] if part is None else [json.loads(part.__getstate__())]  # type: ignore[arg-type]
    while waiting:
        rule = waiting.pop(0)
        if rule["type"] == "Sequence":
            waiting[:0] = rule[name]
        else:
            yield rule


def _texts(rule: Fields) -> list[str]:
    """What a rule puts into texts."""
    if rule["type"] == "Precompiled":  # a trie with its size before it, then texts that end in 0
        charsmap = base64.b64decode(rule["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return [text.decode(errors="replace") for text in sorted(texts, key=len)[-_LONGEST_TEXTS:]]
    return [rule[name] for name in ("prepend", "content") if isinstance(rule.get(name), str)]


def _longest(rule: Fields) -> int:
    return max(map(len, _texts(rule)), default=0)


def _grow(rules: list[Fields]) -> bool:
    """Whether the rules make more than _MOST_GROWTH characters of one that is in one of them, or a usual one."""
    if len(rules) < 2:  # each by itself is bounded
        return False
    pieces = {*_PIECES}
    for rule in rules:
        found = [*_texts(rule), *(rule.get("pattern") or {}).values()]
        pieces.update(found, *found)
    if len(pieces) * len(rules) > _MOST_TRIES:
        return True
    tried = list(map(_normalizer, rules))
    for piece in pieces:
        text = piece
        for each in tried:
            text = each.normalize_str(text)
            if len(text) > _MOST_GROWTH * max(1, len(piece)):
                return True
    return False


def _normalizer(rule: Fields) -> tokenizers.normalizers.Normalizer:
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(empty | {"normalizer": rule})).normalizer
