"""How much longer the rules of a tokenizer.json can make a text, found out before a text takes all memory.

The library has no bound: twenty rules that double a letter make a million of it, in one call.
"""

import base64
import json
import math
from collections.abc import Iterable, Iterator

import tokenizers

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# The parts of a tokenizer.json that have rules, each with the name of the list in a sequence of them.
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# Letters that one rule may make of one: NFKC makes 18 of U+FDFA, SentencePiece's maps 33 bytes, a face its name.
_MOST_GROWTH = 1000
_MOST_RULES = 50_000  # of a normalizer; tables of Chinese characters have some thousands
_MOST_TOGETHER = 16  # letters that all rules of a pre-tokenizer, or of a decoder, may make of one: usual are 4
_MOST_DECODERS = 64  # each may put a space before each token; released tokenizers have up to five
_MOST_LETTERS = 5_000_000  # in memory at once, at up to 100 bytes each
_USUAL_GROWTH = 4  # of a text that is longer than that
# Of the same text and of ids of special tokens in a template; released tokenizers have it once, and up to a dozen.
_MOST_TEXTS, _MOST_PUT = 8, 1000
_MOST_PROCESSORS = 64  # released tokenizers have one or two
# Letters that a rule makes of one at most, of Unicode as a test finds them in the library; ByteLevel makes one of each
# byte, Metaspace puts one before each piece. The others cut, remove, or put spaces before tokens.
_WIDEST = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 2,
    "BertNormalizer": 3,
    "ByteLevel": 4,
    "Metaspace": 2,
}
_PROBES = "a a", "a", "b", "北"  # texts by which rules are known


def without_vocabulary(content: Fields) -> tokenizers.Tokenizer:
    """A tokenizer with the rules of a tokenizer.json alone: the library applies them to each added token when it loads
    the whole.
    """
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(empty | {part: content.get(part) for part in _PARTS}))


def check_growth(backend: tokenizers.Tokenizer, added: list[str], where: object) -> None:
    """Raise UserError for rules of which one makes more than a thousand letters of one, for those of a pre-tokenizer
    or decoder that do so together, and for a normalizer that makes added tokens and short texts very long.

    Args:
        added: contents of the added tokens.
    """
    rules, decoders = _rules(backend, "normalizer"), _rules(backend, "decoder")
    if len(rules) > _MOST_RULES or len(decoders) > _MOST_DECODERS:
        raise UserError(
            f"{where}: found {len(rules):,} rules of a normalizer and {len(decoders):,} of a decoder, expected at most "
            f"{_MOST_RULES:,} and {_MOST_DECODERS}; remove those that do nothing"
        )
    for name, most, bound in (
        ("normalizer", max(map(_widest, rules), default=1), _MOST_GROWTH),
        ("pre_tokenizer", math.prod(map(_widest, _rules(backend, "pre_tokenizer")), start=1.0), _MOST_TOGETHER),
        ("decoder", math.prod(map(_widest, decoders), start=1.0), _MOST_TOGETHER),
    ):
        if most > bound:
            raise UserError(
                f"{where}: found a {name} whose rules make more than {bound:,} letters of one, expected rules that "
                "leave a text about as long as it is; correct their content"
            )
    try:
        Growth(backend).check([*added, *_PROBES])
    except UserError as error:
        raise UserError(f"{where}: of its added tokens or a word: {error}") from error


class Growth:
    """How long a tokenizer's normalizer makes texts."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._rules = _rules(backend, "normalizer")
        self._steps: dict[int, tokenizers.normalizers.Normalizer] = {}  # each rule alone, by its number
        self._bound = math.prod(map(_widest, self._rules), start=1.0)  # letters of one at most; infinite above 1e308
        # the pre-tokenizer comes behind, and makes 4 of one where it makes letters of bytes
        self._share = _USUAL_GROWTH / max(
            _USUAL_GROWTH, math.prod(map(_widest, _rules(backend, "pre_tokenizer")), start=1.0)
        )

    def check(self, texts: list[str]) -> None:
        """Raise UserError for texts that become so long that they take all memory.

        Where the rules could do so, they are applied one after the other to the texts as one.
        """
        read = sum(map(len, texts)) + len(texts)
        if self._bound * read <= _MOST_LETTERS * self._share:
            return
        most = (_MOST_LETTERS + _USUAL_GROWTH * read) * self._share
        text = "\n".join(texts)
        for number, rule in enumerate(self._rules):
            pattern = rule["pattern"].get("String") if rule["type"] == "Replace" else None
            if pattern:
                self._check(len(text) + text.count(pattern) * (len(rule["content"]) - len(pattern)), most, read)
                text = text.replace(pattern, rule["content"])
                continue
            size = max(1, int(_MOST_LETTERS / _widest(rule)))  # of pieces of which none becomes too long
            applied = self._applied(number, _cut(text, size), most)
            if rule["type"] in ("Replace", "Prepend"):  # some do it once a text, where it begins or ends
                of_texts = (piece for each in text.split("\n") for piece in _cut(each, size))
                applied = max(applied, self._applied(number, of_texts, most, "\n"), key=len)
            self._check(len(applied), most, read)
            text = applied

    def _applied(self, number: int, pieces: Iterable[str], most: float, between: str = "") -> str:
        """Pieces of text after a rule, up to the first that makes them too long."""
        found, made = [], 0
        for piece in pieces:
            found.append(self._step(number).normalize_str(piece))
            if (made := made + len(found[-1])) > most:
                break
        return between.join(found)

    @staticmethod
    def _check(made: int, most: float, read: int) -> None:
        if made > most:
            raise UserError(
                f"found a text that the tokenizer's normalizer makes {made / read:,.0f} times as long, expected at "
                f"most {_USUAL_GROWTH} times for a long one; correct the tokenizer, or divide the text"
            )

    def _step(self, number: int) -> tokenizers.normalizers.Normalizer:
        if number not in self._steps:
            self._steps[number] = without_vocabulary({"normalizer": self._rules[number]}).normalizer
        return self._steps[number]


def _cut(text: str, size: int) -> Iterator[str]:
    """Pieces of so many letters; of an empty text one."""
    return (text[begin : begin + size] for begin in range(0, len(text) or 1, size))


def check_template(backend: tokenizers.Tokenizer, where: object) -> None:
    """Raise UserError for a post-processor that puts a special token around texts of which it has no id: the library
    panics at the first text, and writes that to the terminal itself. And for one that makes texts much longer.
    """
    processors = _rules(backend, "post_processor")
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


def _rules(backend: tokenizers.Tokenizer, name: str) -> list[Fields]:
    """The rules of a part of a tokenizer, one after the other, as tokenizer.json describes them."""
    part = getattr(backend, name)
    waiting: list[Fields] = [] if part is None else [json.loads(part.__getstate__())]
    found: list[Fields] = []
    while waiting:
        rule = waiting.pop()
        if rule["type"] == "Sequence":
            waiting += reversed(rule[_PARTS[name]])
        else:
            found.append(rule)
    return found


def _widest(rule: Fields) -> float:
    """The letters that a rule makes of one at most."""
    kind = rule["type"]
    if kind == "Replace":
        text, content = rule["pattern"].get("String"), len(rule["content"])
        return max(1, content / len(text)) if text else content + 1  # a regex may match between letters
    if kind == "Prepend":
        return len(rule["prepend"]) + 1
    if kind == "Precompiled":
        return max(1, *map(len, _texts_of_map(rule["precompiled_charsmap"])))
    if kind == "CTC" and not rule["word_delimiter_token"] or kind == "BPEDecoder" and not rule["suffix"]:
        return 2  # a space between all letters
    return _WIDEST.get(kind, 1)


def _texts_of_map(charsmap: str) -> list[str]:
    """What a map of SentencePiece puts in the place of others: a trie with its size before it, then texts that end in
    0.
    """
    content = base64.b64decode(charsmap)
    return content[4 + int.from_bytes(content[:4], "little") :].decode(errors="replace").split("\0")
