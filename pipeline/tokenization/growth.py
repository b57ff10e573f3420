"""How much longer the rules of a tokenizer.json can make a text, found out before any text meets them.

The library has no bound: twenty rules that double a letter make a million of it, in one call that takes all memory.
"""

import base64
import functools
import json
import math
import re
import sys
import unicodedata
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
# Letters that all rules together may make of one: NFKC makes 18 of U+FDFA, SentencePiece's maps 33 bytes.
_MOST_GROWTH = 1000
# Letters in memory at once, at 40 bytes each: more than texts that are read whole have.
_MOST_LETTERS = 20_000_000
_MOST_DECODERS = 64  # each may put a space before each token; released tokenizers have up to five
_MOST_UNICODE = 8  # rules of Unicode, each a look at all letters; released tokenizers have up to four
# Of the same text and of ids of special tokens in a template; released tokenizers have it once, and up to a dozen.
_MOST_TEXTS, _MOST_PUT = 8, 1000
_MOST_PROCESSORS = 64  # released tokenizers have one or two
# Of a pre-tokenizer and a decoder; the others cut, or put a space before a token.
_GROWING = "ByteLevel", "Metaspace"
_GROWING_DECODERS = "Replace", "CTC", "BPEDecoder"
_BYTES_OF_A_LETTER = 4  # in UTF-8, and letters that ByteLevel makes of one
# What a rule of Unicode makes of one letter at most; a test compares them with the library.
_WIDEST = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 3, "Nmt": 1}
_REMOVING = "StripAccents", "Strip"  # letters, without others in their place
_APART = "\ua000"  # a letter that no rule of Unicode changes, nor makes of another
_LAST_LETTER = 0x33480  # behind it are private ones, marks and nothing yet


def without_vocabulary(content: Fields) -> tokenizers.Tokenizer:
    """A tokenizer with the rules of a tokenizer.json alone: the library applies them to each added token when it loads
    the whole.
    """
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(empty | {part: content.get(part) for part in _PARTS}))


def growth(backend: tokenizers.Tokenizer) -> float:
    """The letters that a tokenizer's normalizer and pre-tokenizer make of one at most."""
    cutting = [_as_replacement(rule) for rule in _rules(backend, "pre_tokenizer") if rule["type"] in _GROWING]
    return _growth([*_rules(backend, "normalizer"), *cutting])


def check_growth(backend: tokenizers.Tokenizer, added: Iterable[str], where: object) -> None:
    """Raise UserError for rules of a normalizer, pre-tokenizer or decoder that make more than a thousand letters of
    one, or for added tokens that are texts.

    Args:
        added: contents of the added tokens.
    """
    decoders = _rules(backend, "decoder")
    made = {
        "normalizer": growth(backend),
        "decoder": math.inf
        if len(decoders) > _MOST_DECODERS
        else _growth([_as_replacement(rule) for rule in decoders if rule["type"] in _GROWING_DECODERS]),
    }
    for name, most in made.items():
        if most > _MOST_GROWTH:
            raise UserError(
                f"{where}: found a {name} whose rules can make more than {_MOST_GROWTH:,} letters of one, expected "
                "rules that leave a text about as long as it is; correct their content"
            )
    if (letters := sum(map(len, added))) * made["normalizer"] > _MOST_LETTERS:
        raise UserError(f"{where}: found added tokens of {letters:,} letters, expected words; remove the long ones")


def check_length(texts: list[str], growth: float, normalizer: tokenizers.normalizers.Normalizer | None) -> None:
    """Raise UserError if a normalizer makes texts so long that they take all memory.

    Args:
        growth: the letters that it makes of one at most.
    """
    if normalizer is None or growth * sum(map(len, texts)) <= _MOST_LETTERS:
        return
    size, read, made = int(_MOST_LETTERS / growth), 0, 0
    for text in texts:
        for begin in range(0, len(text), size):
            piece = text[begin : begin + size]
            read, made = read + len(piece), made + len(normalizer.normalize_str(piece))
            if made > _MOST_LETTERS + _BYTES_OF_A_LETTER * read:
                raise UserError(
                    f"found a text of which the tokenizer's normalizer makes {made / read:.0f} times as many letters, "
                    f"expected at most {_BYTES_OF_A_LETTER} times for a long one; correct the tokenizer, or divide it"
                )


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


def _as_replacement(rule: Fields) -> Fields:
    """The replacement of letters that is in a rule of a pre-tokenizer or decoder."""
    spaces = {"CTC": "word_delimiter_token", "BPEDecoder": "suffix"}
    if name := spaces.get(rule["type"]):
        return {"type": "Replace", "pattern": {"String": rule[name]}, "content": " "}
    if rule["type"] == "Metaspace" and "split" in rule:  # before each piece, which has a letter at least
        return {"type": "Replace", "pattern": {"String": ""}, "content": rule["replacement"]}
    return rule


def _growth(rules: list[Fields]) -> float:
    """A bound of the letters that rules make of one letter, or of no text at all.

    Rules of Unicode count by what each makes of a letter at most; if that is too much, by what it makes of each letter.
    """
    bound = _Weights(exact=False).before_all(rules)
    exact = bound > _MOST_GROWTH and sum(rule["type"] in _WIDEST for rule in rules) <= _MOST_UNICODE
    return _Weights(exact=True).before_all(rules) if exact else bound


class _Weights:
    """For each letter a bound of the letters that the rules behind a place make of it. From the last rule to the first:
    before a rule that replaces A by a text, A has the weight of this text, or each letter of A its share.

    A weight is the greater of a letter's own and the least one, and what is added to each.

    Args:
        exact: whether to look at what a rule of Unicode makes of each letter.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._own: dict[str, float] = {}
        self._greatest = 0.0  # of all that were ever a letter's own
        self._least = 1.0
        self._added = 0.0
        self._at_start = 0.0

    def before_all(self, rules: list[Fields]) -> float:
        """The greatest weight before the first of the rules."""
        for rule in reversed(rules):
            self._go_before(rule)
            if not self._most() + self._at_start <= sys.float_info.max / 2:
                return math.inf
        return max(self._least, *self._own.values(), 0.0) + self._added + self._at_start

    def _go_before(self, rule: Fields) -> None:
        kind = rule["type"]
        if kind == "Replace":
            self._replace(rule["pattern"], self._weigh(rule["content"]))
        elif kind == "Prepend":
            self._at_start += self._weigh(rule["prepend"])
        elif kind == "Precompiled":
            self._raise_all(max(map(self._weigh, _texts_of_map(rule["precompiled_charsmap"])), default=0.0))
        elif kind in _WIDEST and self._exact:
            self._read_each(rule)
        elif kind not in _REMOVING:  # ByteLevel, and rules of a later library
            self._raise_all(_WIDEST.get(kind, _BYTES_OF_A_LETTER) * self._most())

    def _replace(self, pattern: Fields, weight: float) -> None:
        text = pattern.get("String")
        if text:
            for letter in set(text):
                self._set(letter, weight if len(text) == 1 else max(self._weight(letter), weight / len(text)))
        elif text is None and takes_letters(pattern["Regex"]):
            self._raise_all(weight)
        else:  # between all letters
            self._added += weight
            self._at_start += weight

    def _read_each(self, rule: Fields) -> None:
        if rule["type"] in ("NFC", "NFKC"):  # letters and marks become another letter: each has the weight of it
            for letter in list(self._own):
                for part in _parts_of(letter):
                    self._set(part, max(self._weight(part), self._weight(letter)))
        changed = {letter: self._weigh(made) for letter, made in _changed(json.dumps(rule)).items()}
        for letter, weight in changed.items():
            self._set(letter, weight)

    def _set(self, letter: str, weight: float) -> None:
        self._own[letter] = weight - self._added
        self._greatest = max(self._greatest, self._own[letter])

    def _raise_all(self, weight: float) -> None:
        self._least = max(self._least, weight - self._added)

    def _weight(self, letter: str) -> float:
        return max(self._own.get(letter, 0.0), self._least) + self._added

    def _weigh(self, text: str) -> float:
        return sum(map(self._weight, text))

    def _most(self) -> float:
        """No letter has a greater weight."""
        return max(self._least, self._greatest) + self._added


def _texts_of_map(charsmap: str) -> list[str]:
    """What a map of SentencePiece puts in the place of others: a trie with its size before it, then texts that end in
    0.
    """
    content = base64.b64decode(charsmap)
    return content[4 + int.from_bytes(content[:4], "little") :].decode(errors="replace").split("\0")


def _parts_of(letter: str) -> Iterator[str]:
    """What a letter is composed of, and what these are."""
    for code in unicodedata.decomposition(letter).split():
        if not code.startswith("<"):
            yield chr(int(code, 16))
            yield from _parts_of(chr(int(code, 16)))
    if 0xAC00 <= ord(letter) < 0xD7A4:  # a syllable of Hangul, which the table leaves out
        yield from unicodedata.normalize("NFD", letter)


@functools.lru_cache(maxsize=32)
def _changed(rule: str) -> dict[str, str]:
    """What a rule of Unicode makes of each letter that it changes."""
    letters = [chr(number) for number in range(_LAST_LETTER) if not 0xD800 <= number < 0xE000 and chr(number) != _APART]
    made = (
        without_vocabulary({"normalizer": json.loads(rule)})
        .normalizer.normalize_str(_APART.join(letters))
        .split(_APART)
    )
    return {letter: other for letter, other in zip(letters, made, strict=True) if letter != other}


# Of a regex as Oniguruma reads it: letters, classes of letters, groups, and what repeats the one before.
_TOKEN = re.compile(
    r"(?P<letter>\\(?:[pP]\{\^?\w+\}|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F ]+\}|u[0-9a-fA-F]{4}|[wWsSdDhHRXnrtfvae]|\W))"
    r"|(?P<place>[\^$]|\\[bBAzZG]|\\[1-9]\d*)|(?P<unknown>\\.?|\[\^?\])"
    r"|(?P<group>\((?:\?(?:[:>]|[im-]+:|<[A-Za-z]\w*>))?(?!\?))"
    r"|(?P<look>\(\?<?[=!])|(?P<odd>\(\?)|(?P<close>\))|(?P<other>\|)|(?P<open>\[)"
    r"|(?P<may>\{0*(?:,\d*)?\}|[*?]|\{,\d*\})|(?P<must>\+\??|\{\d+(?:,\d*)?\})|(?P<plain>.)",
    re.DOTALL,
)


def takes_letters(pattern: str) -> bool:
    """Whether each match of a regex has a letter; False also where a look at it in one pass doesn't tell."""
    # Of each group that is open: whether its branches so far, and this one, have a letter that must be there.
    groups = [[True, False, False]]  # all branches, this branch, whether it looks around alone
    last = False  # whether the piece before has one, if nothing makes it optional
    place = 0
    while found := _TOKEN.match(pattern, place):
        kind, place = found.lastgroup, found.end()
        if kind == "may":
            last = False
            continue
        if kind == "must":
            last = last and not re.search(r"[{,]0+\}", found[0])  # the greater number may come first
            continue
        groups[-1][1] |= last  # nothing makes it optional
        last = False
        if kind in ("unknown", "odd"):
            return False
        if kind in ("letter", "plain"):
            last = True
        elif kind == "open":
            place = _end_of_class(pattern, place)
            last = place > 0
            if not last:
                return False
        elif kind in ("group", "look"):
            groups.append([True, False, kind == "look"])
        elif kind == "other":
            groups[-1][0] &= groups[-1][1]
            groups[-1][1] = False
        elif kind == "close":
            every, this, looks = groups.pop()
            if not groups:
                return False
            last = every and this and not looks
    every, this, _ = groups[0]
    return len(groups) == 1 and every and (this or last)


def _end_of_class(pattern: str, place: int) -> int:
    """The place behind the `]` that closes a class of letters, in which there may be others; 0: there is none."""
    depth = 1
    while place < len(pattern):
        letter, place = pattern[place], place + (2 if pattern[place] == "\\" else 1)
        depth += (letter == "[") - (letter == "]")
        if not depth:
            return place
    return 0
