"""Divides text into words with array operations, where the tokenizer's rules divide it; counts distinct words."""

import unicodedata
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute  # noqa: F401  here, not when the first word is looked up: it takes a while
import tokenizers

from cloze.pipeline import ragged
from cloze.pipeline.fields import Fields
from cloze.pipeline.tokenization.backends import content_of, parts
from cloze.pipeline.tokenization.growth import Growth

_SPACE, _LETTER, _ISOLATED, _ISOLATED_REST, _UNASKED = range(5)  # classes of bytes and characters
_CONTEXT_FREE_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFD", "StripAccents"}
_COMPOSING_NORMALIZERS = {"NFC", "NFKC", "NFKD"}  # free of context at white space, not around isolated characters
_WORD_PRE_TOKENIZERS = {"BertPreTokenizer", "WhitespaceSplit"}
_NO_CUTS = np.empty(0, np.int64)
_MASKS = np.array([(1 << 8 * length) - 1 for length in range(8)], np.uint64)


# Scripts that put no space between words, with their punctuation: Thai and Lao, Burmese, Khmer, Chinese and Japanese.
_UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x312F),
    (0x31A0, 0xA4CF),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F),
    (0xFF00, 0xFF9F),
    (0x1AFF0, 0x1B16F),
    (0x20000, 0x3FFFF),
)
# The bytes that byte-level BPE writes as themselves; the others are U+0100 and following, in order (GPT-2, 2019).
_PLAIN_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PLAIN_BYTES} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted(set(range(256)) - set(_PLAIN_BYTES)))
}


def bytes_of(token: str) -> bytes:
    """The bytes of a token of a byte-level model; other characters are 0."""
    return bytes(_BYTE_OF.get(character, 0) for character in token)


def begins_word(token: str, bytes_as_characters: bool) -> bool:
    """Whether a token of BPE or Unigram begins a word: with white space (`Ġ`, `▁`), or in a script without spaces,
    where each token is a word, unless it continues a character (combining marks, bytes inside).

    Args:
        bytes_as_characters: the token is one of a byte-level model.
    """
    first = last = token[:1]
    if bytes_as_characters and first:
        data = bytes_of(token[:4])
        size = 1 + (data[0] >= 0xC0) + (data[0] >= 0xE0) + (data[0] >= 0xF0)
        # What a character's first bytes alone may become, from the first to the last one.
        first, last = (data[:size].ljust(size, end).decode(errors="ignore") for end in (b"\x80", b"\xbf"))
    if not first or not last:
        return False
    if first != last:
        return _is_unspaced(first) and _is_unspaced(last)
    if first == "▁" or first.isspace():
        return True
    return _is_unspaced(first) and not unicodedata.category(first).startswith("M")


def _is_unspaced(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _UNSPACED)


def word_of(key: int | str) -> str:
    """The word of a key of `WordSplitter.distinct`."""
    return key if isinstance(key, str) else key.to_bytes(8, "little")[: key >> 56].decode()


class WordSplitter:
    """Divides UTF-8 text at white space, and around characters that the tokenizer isolates.

    For each character the tokenizer is tested once with the character between two letters. A character that is neither
    white space nor isolated stays in the word: fewer divisions are always safe. reason: why this tokenizer's words
    can't be found this way; empty if they can. prefix: `▁` if the pre-tokenizer cuts at white space and puts it before
    each word, else empty.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.prefix = "▁" if _marks_each_word(content_of(backend)["pre_tokenizer"]) else ""
        self.reason = self._why_not()
        self._classes = np.full(0x110000, _UNASKED, np.uint8)
        self._byte_classes = np.full(256, _LETTER, np.uint8)  # bytes from 128 on get the class of their character
        if not self.reason:
            self._byte_classes[:128] = [self._ask(chr(code)) for code in range(128)]

    def split(self, data: bytes, cuts: np.ndarray = _NO_CUTS) -> tuple[np.ndarray, np.ndarray]:
        """Byte positions and lengths of the words of a text; words end at the byte positions `cuts`."""
        classes = self._classify(np.frombuffer(data, np.uint8))
        letter = classes == _LETTER
        starts = classes == _ISOLATED
        starts[:1] |= letter[:1]
        starts[1:] |= letter[1:] & ~letter[:-1]
        starts[cuts] |= letter[cuts]
        ends = classes != _SPACE
        ends[:-1] &= starts[1:] | ~ends[1:]
        positions = np.flatnonzero(starts)
        return positions, np.flatnonzero(ends) - positions + 1

    def distinct(self, data: bytes, cuts: np.ndarray = _NO_CUTS) -> tuple[list[int | str], np.ndarray, np.ndarray]:
        """The distinct words as keys (see `word_of`), and for each word of the text its key's index and its position.

        Keys of words of up to 7 bytes are integers: the bytes, with the length in the highest byte. Arrow encodes
        integers several times as fast as strings.
        """
        positions, lengths = self.split(data, cuts)
        padded = data + bytes(8)
        at_each_byte: np.ndarray = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
        short = lengths <= 7
        keys = at_each_byte[positions] & _MASKS[np.minimum(lengths, 7)]
        keys |= lengths.astype(np.uint64) << np.uint64(56)
        if short.all():
            encoded = ragged.to_arrow(keys).dictionary_encode()
            return encoded.dictionary.to_pylist(), ragged.from_arrow(encoded.indices), positions
        long = np.flatnonzero(~short)
        keys[long] = 0  # not a key, since words have a length
        encoded = ragged.to_arrow(keys).dictionary_encode()
        numbers = ragged.from_arrow(encoded.indices).copy()
        letters = ragged.gather(np.frombuffer(data, np.uint8), positions[long], lengths[long])
        offsets = ragged.to_offsets(lengths[long]).astype(np.int32)
        strings = pa.StringArray.from_buffers(
            len(long), pa.py_buffer(offsets), pa.py_buffer(letters)
        ).dictionary_encode()
        numbers[long] = ragged.from_arrow(strings.indices) + len(encoded.dictionary)
        return encoded.dictionary.to_pylist() + strings.dictionary.to_pylist(), numbers, positions

    def _classify(self, values: np.ndarray) -> np.ndarray:
        """The class of each byte: that of its character; for isolated characters only on the first byte."""
        classes = self._byte_classes.take(values)
        leads = np.flatnonzero(values >= 0xC0)
        if not len(leads):
            return classes
        lead = values[leads].astype(np.uint32)
        sizes = 2 + (lead >= 0xE0) + (lead >= 0xF0)
        codes = lead & np.array([0, 0, 0x1F, 0x0F, 0x07], np.uint32)[sizes]
        for place in (1, 2, 3):
            more = sizes > place
            codes[more] = codes[more] << 6 | values[leads[more] + place] & 0x3F
        wide = self._classes[codes]
        if (wide == _UNASKED).any():
            for code in np.unique(codes[wide == _UNASKED]).tolist():
                self._classes[code] = self._ask(chr(code))
            wide = self._classes[codes]
        classes[leads] = wide
        rest = np.where(wide == _ISOLATED, _ISOLATED_REST, wide)
        for place in (1, 2, 3):
            more = sizes > place
            classes[leads[more] + place] = rest[more]
        return classes

    def _ask(self, character: str) -> int:
        if character == self.prefix:  # alone it is a word; in a word it is a space
            return _LETTER
        parts = [part.removeprefix(self.prefix) for part in self.parts(f"a{character}b")]
        if len(parts) >= 2 and parts[0] == "a" and parts[-1] == "b":
            return _SPACE if len(parts) == 2 else _ISOLATED
        return _LETTER

    def parts(self, text: str) -> list[str]:
        """The words of a text by the tokenizer's own normaliser and pre-tokenizer.

        Raises:
            UserError: they make the text so long that it takes all memory.
        """
        self._growth.check([text])
        return parts(self.backend, text)

    @cached_property
    def _growth(self) -> Growth:
        return Growth(self.backend)

    def _why_not(self) -> str:
        content = content_of(self.backend)
        kind = "WhitespaceSplit" if self.prefix else (content["pre_tokenizer"] or {}).get("type")
        if kind not in _WORD_PRE_TOKENIZERS:
            return f"pre-tokenizer {kind}"
        normalizer = content["normalizer"] or {"type": "Sequence", "normalizers": []}
        parts = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
        safe = _CONTEXT_FREE_NORMALIZERS | (_COMPOSING_NORMALIZERS if kind == "WhitespaceSplit" else set())
        foreign = [part["type"] for part in parts if part["type"] not in safe]
        return f"normalizer {', '.join(foreign)}" if foreign else ""


def _marks_each_word(pre_tokenizer: Fields | None) -> bool:
    """Whether a pre-tokenizer cuts at white space and then puts `▁` before each word, as XLM-R's does."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["WhitespaceSplit", "Metaspace"]:
        return False
    return steps[1]["replacement"] == "▁" and steps[1]["prepend_scheme"] == "always"
