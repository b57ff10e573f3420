"""Splits text into sentences, as byte positions in UTF-8, with array operations over a whole chunk.

A boundary is the first byte of a sentence. Nothing is removed: the concatenated sentences are the text.
"""

import re
from collections.abc import Callable

import numpy as np

from cloze.pipeline import ragged

# Titles, ranks, months, Latin and bibliographic abbreviations after which English rarely ends a sentence; of at most
# 8 bytes.
_ABBREVIATIONS = (
    b"adm capt cf ch cmdr co col corp dept dr drs ed eds eg esq etc fig figs gen gov hon ie inc jr lieut lt ltd maj "
    b"messrs mlle mme mr mrs ms mt no nos op pp pres prof pvt rev sen sergt sgt sr st vol vols vs viz jan feb mar apr "
    b"jun jul aug sept oct nov dec e.g i.e a.m p.m u.s"
).split()
_KEYS = np.array([int.from_bytes(word[::-1].ljust(8, b"\0"), "little") for word in _ABBREVIATIONS], np.uint64)
_DOT, _NEWLINE = ord("."), ord("\n")


def _table(characters: bytes) -> np.ndarray:
    table = np.zeros(256, bool)
    table[list(characters)] = True
    return table


_SPACE = _table(b" \t\r\n\v\f")
_END = _table(b".!?")
_CLOSER = _table(b".!?\"')]")
_OPENER = _table(b"\"'([")
_SMALL = _table(bytes(range(ord("a"), ord("z") + 1)))
_IN_WORD = _table(bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + b".")
_IN_WORD[0x80:] = True
_LEADS = _table(b".!?\n\xe2\xe3\xef")  # first bytes of all characters that may end a sentence
_ELLIPSIS = ("…",)
_WIDE_ENDS = ("。", "！", "？", "｡")
_WIDE_CLOSERS = ("’", "”", "」", "』", "】", "》", "〉", "）", "。", "！", "？", "｡", "…")
_MARGIN = 16  # padding around a chunk, so that looking ahead and back needs no bounds check


def by_rules(data: bytes) -> np.ndarray:
    """Boundaries by punctuation and blank lines, except dots after abbreviations and initials. int64, ascending.

    Sentence ends are: . ! ? … followed by closing marks and white space, unless a lower-case letter follows; 。！？｡
    followed by closing marks; and blank lines.
    """
    values = np.frombuffer(bytes(_MARGIN) + data + bytes(_MARGIN), np.uint8)
    wide = not data.isascii()
    marks = np.flatnonzero(_LEADS.take(values))  # one pass over all bytes; later steps process few positions
    kinds = values[marks]
    ends = marks[_END[kinds]]
    after = ends + 1
    dots = (values[ends] == _DOT) & _SPACE[values[after]]
    if wide:
        ellipses = marks[_is_one_of(values, marks, _ELLIPSIS)]
        after = np.concatenate([after, ellipses + 3])
        dots = np.concatenate([dots, np.zeros(len(ellipses), bool)])
        ends = np.concatenate([ends, ellipses])
    after = _skip_closers(values, after, wide)
    real = _SPACE[values[after]]
    abbreviated = dots & real
    abbreviated[abbreviated] = _is_abbreviation(values, ends[abbreviated])
    after = _skip_spaces(values, after[real & ~abbreviated])
    first = values[after]
    goes_on = _SMALL[first] | _OPENER[first] & _SMALL[values[after + 1]]
    boundaries = [after[~goes_on], _blank_lines(values, marks[kinds == _NEWLINE])]
    if wide:
        wide_ends = marks[_is_one_of(values, marks, _WIDE_ENDS)]
        boundaries.append(_skip_spaces(values, _skip_closers(values, wide_ends + 3, wide)))
    starts = ragged.union(*boundaries) - _MARGIN
    return starts[starts < len(data)]


def _is_one_of(values: np.ndarray, positions: np.ndarray, characters: tuple[str, ...]) -> np.ndarray:
    three = values[positions].astype(np.uint32) << 16 | values[positions + 1].astype(np.uint32) << 8
    three |= values[positions + 2]
    return np.isin(three, np.array([int.from_bytes(c.encode(), "big") for c in characters], np.uint32))


def _skip_closers(values: np.ndarray, positions: np.ndarray, wide: bool) -> np.ndarray:
    """Positions after closing marks (and further end marks), at most ten."""
    positions = positions.copy()
    for _ in range(10):
        step = _CLOSER[values[positions]].astype(np.int64)
        if wide:
            step += 3 * _is_one_of(values, positions, _WIDE_CLOSERS)
        if not step.any():
            break
        positions = np.minimum(positions + step, len(values) - _MARGIN)
    return positions


def _skip_spaces(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The first byte at or after the positions that isn't white space."""
    positions = positions.copy()
    active = np.flatnonzero(_SPACE[values[positions]])
    for _ in range(16):
        if not len(active):
            return positions
        positions[active] += 1
        active = active[_SPACE[values[positions[active]]]]
    solid = np.flatnonzero(~_SPACE[values])  # long runs of white space are rare: handled by a lookup
    positions[active] = solid[np.searchsorted(solid, positions[active])]
    return positions


def _blank_lines(values: np.ndarray, newlines: np.ndarray) -> np.ndarray:
    after = _skip_spaces(values, newlines + 1)
    return after[:-1][after[:-1] > newlines[1:]]


def _is_abbreviation(values: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """Whether the word before each dot is an abbreviation or an initial."""
    before = values[dots[:, None] - np.arange(1, 9)]
    in_word = np.logical_and.accumulate(_IN_WORD[before], axis=1)
    capital = (before[:, 0] >= ord("A")) & (before[:, 0] <= ord("Z")) & (before[:, 0] != ord("I"))
    initial = capital & ~in_word[:, 1]
    small = np.where((before >= ord("A")) & (before <= ord("Z")), before | 0x20, before)
    keys = np.ascontiguousarray(np.where(in_word, small, 0)).astype(np.uint8).view("<u8")[:, 0]
    return initial | np.isin(keys, _KEYS)


def by_lines(data: bytes) -> np.ndarray:
    """Boundaries after each line end: one sentence per line."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1


_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n\s*")


def by_paragraphs(data: bytes) -> np.ndarray:
    """Boundaries at blank lines only."""
    return np.array([match.end() for match in _BLANK_LINE.finditer(data)], np.int64)


def by_tabs(data: bytes) -> np.ndarray:
    """Boundaries after each tab: the two segments of a given pair."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\t")) + 1


SPLITTERS: dict[str, Callable[[bytes], np.ndarray]] = {
    "rules": by_rules,
    "lines": by_lines,
    "none": by_paragraphs,
    "pairs": by_tabs,
}


def split(text: str, splitter: str = "rules") -> list[str]:
    """The sentences of one text, without surrounding white space."""
    data = text.encode()
    cuts = [0, *SPLITTERS[splitter](data).tolist(), len(data)]
    pieces = (data[low:high].decode().strip() for low, high in zip(cuts[:-1], cuts[1:], strict=True))
    return [piece for piece in pieces if piece]
