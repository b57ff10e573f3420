"""Cut text into words with array operations, exactly where a tokenizer's own rules cut, or less finely."""

import json

import numpy as np
import pyarrow as pa
import tokenizers

_SPACE, _LETTER, _ISOLATED, _ISOLATED_REST, _UNASKED = range(5)  # classes of a byte or character
_CONTEXT_FREE_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFD", "StripAccents"}
_WORD_PRE_TOKENIZERS = {"BertPreTokenizer", "WhitespaceSplit"}


class WordSplitter:
    """Cuts UTF-8 text at white space, and around what the tokenizer isolates.

    The tokenizer is asked once for each character how it treats it between two letters. What it neither drops as
    white space nor isolates stays in the word, whatever the normaliser makes of it: cutting less is always safe.
    reason: why this tokenizer's words can't be found so; empty if they can.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.reason = self._why_not()
        self._classes = np.full(0x110000, _UNASKED, np.uint8)
        self._byte_classes = np.full(256, _LETTER, np.uint8)  # those of 128 on are set from the character
        if not self.reason:
            self._byte_classes[:128] = [self._ask(chr(code)) for code in range(128)]

    def split(self, data: bytes) -> tuple[pa.StringArray, np.ndarray]:
        """The words of a text, and the byte position of each."""
        values = np.frombuffer(data, np.uint8)
        classes = self._classify(values)
        letter = classes == _LETTER
        starts = classes == _ISOLATED
        starts[:1] |= letter[:1]
        starts[1:] |= letter[1:] & ~letter[:-1]
        kept = classes != _SPACE
        ends = kept.copy()
        ends[:-1] &= starts[1:] | ~kept[1:]
        positions = np.flatnonzero(starts)
        lengths = np.flatnonzero(ends) - positions + 1
        offsets = np.zeros(len(positions) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        words = pa.StringArray.from_buffers(len(positions), pa.py_buffer(offsets), pa.py_buffer(values[kept]))
        return words, positions

    def _classify(self, values: np.ndarray) -> np.ndarray:
        """The class of each byte: that of its character, which stands on the first byte only if it is isolated."""
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
        found = self._classes[codes]
        if (found == _UNASKED).any():
            for code in np.unique(codes[found == _UNASKED]).tolist():
                self._classes[code] = self._ask(chr(code))
            found = self._classes[codes]
        classes[leads] = found
        rest = np.where(found == _ISOLATED, _ISOLATED_REST, found)
        for place in (1, 2, 3):
            more = sizes > place
            classes[leads[more] + place] = rest[more]
        return classes

    def _ask(self, character: str) -> int:
        parts = self.parts(f"a{character}b")
        if len(parts) >= 2 and parts[0] == "a" and parts[-1] == "b":
            return _SPACE if len(parts) == 2 else _ISOLATED
        return _LETTER

    def parts(self, text: str) -> list[str]:
        """What the tokenizer's own normaliser and pre-tokenizer make of a text."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        return [part for part, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]

    def _why_not(self) -> str:
        content = json.loads(self.backend.to_str())
        kind = (content["pre_tokenizer"] or {}).get("type")
        if kind not in _WORD_PRE_TOKENIZERS:
            return f"pre-tokenizer {kind}"
        normalizer = content["normalizer"] or {"type": "Sequence", "normalizers": []}
        parts = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
        foreign = [part["type"] for part in parts if part["type"] not in _CONTEXT_FREE_NORMALIZERS]
        return f"normalizer {', '.join(foreign)}" if foreign else ""
