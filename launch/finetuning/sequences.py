"""Texts as sequences of token ids: special tokens around them, cut where they are too long, counted where cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeline import ragged
from pipeline.encoding import windows
from pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sequences:
    """N sequences as flat arrays, without padding.

    input_ids (T,) int64, special tokens included. offsets (N+1,) int64. segment_b_start (N,) int64: first position of
    the second segment, or the length.
    """

    input_ids: np.ndarray
    offsets: np.ndarray
    segment_b_start: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Indices of the tokens of some sequences, one sequence after another: int64."""
        return ragged.ranges(self.offsets[:-1][rows], self.lengths[rows])

    def batch(self, rows: np.ndarray) -> dict:
        """What a model's forward takes of some sequences: as pipeline.collate.collate, without anything to predict."""
        lengths = self.lengths[rows]
        offsets = ragged.to_offsets(lengths)
        positions = ragged.within(offsets)
        segments = positions >= np.repeat(self.segment_b_start[rows], lengths)
        return {
            "input_ids": torch.from_numpy(self.input_ids[self.tokens(rows)]),
            "token_type_ids": torch.from_numpy(segments.astype(np.int64)),
            "position_ids": torch.from_numpy(positions),
            "sequence_offsets": torch.from_numpy(offsets.astype(np.int32)),
            "max_sequence_length": int(lengths.max()),
        }


@dataclass(frozen=True)
class Cut:
    """What did not fit."""

    sequences: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.sequences:,} cut by {self.tokens:,} tokens in all" if self.sequences else "none cut"


def kept_lengths(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that stay of two texts (N,) each that share `room`: the longer one is cut, as `tokenizers` does
    (truncation "longest_first").
    """
    shorter = np.minimum(first, second)
    halves = shorter > room // 2
    cut_shorter = np.where(halves, room // 2, shorter)
    cut_longer = np.where(halves, room - room // 2, room - shorter)
    fits = first + second <= room
    swapped = first > second
    kept_first = np.where(fits, first, np.where(swapped, cut_longer, cut_shorter))
    kept_second = np.where(fits, second, np.where(swapped, cut_shorter, cut_longer))
    return kept_first, kept_second


def _parts(lengths: np.ndarray, kept: np.ndarray, keep: str, head_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of what stays at the beginning and at the end of each text."""
    if keep == "tail":
        head = np.zeros_like(kept)
    elif keep == "head_tail":
        head = np.where(kept < lengths, np.minimum(kept, head_tokens), kept)
    else:
        head = kept
    return head, kept - head


def build_sequences(
    tokenizer: Tokenizer, first: list[str], second: list[str] | None, max_length: int, *, keep: str = "head",
    head_tokens: int = 128,
) -> tuple[Sequences, Cut]:  # fmt: skip
    """`[CLS] A [SEP]`, or with a second list `[CLS] A [SEP] B [SEP]`, at most `max_length` tokens each.

    Args:
        keep: what stays of a text that is too long: its head, its tail, or head_tail: the first `head_tokens` and as
            many of the last as there is room for (Sun et al. 2019, arXiv 1905.05583).
    """
    special = tokenizer.special_tokens
    sides = [tokenizer.encode_batch(texts) for texts in ([first] if second is None else [first, second])]
    lengths = [np.diff(offsets) for _, offsets in sides]
    room = max_length - 1 - len(sides)
    kept = [np.minimum(lengths[0], room)] if second is None else list(kept_lengths(*lengths, room))
    total = 1 + sum(part + 1 for part in kept)
    offsets = ragged.to_offsets(total)
    ids = np.empty(offsets[-1], np.int64)
    place = offsets[:-1].copy()
    ids[place] = special.classification
    place += 1
    starts = []
    for (flat, bounds), length, stay in zip(sides, lengths, kept, strict=True):
        starts.append(place - offsets[:-1])
        head, tail = _parts(length, stay, keep, head_tokens)
        ids[ragged.ranges(place, head)] = flat[ragged.ranges(bounds[:-1], head)]
        ids[ragged.ranges(place + head, tail)] = flat[ragged.ranges(bounds[1:] - tail, tail)]
        place = place + stay
        ids[place] = special.separator
        place += 1
    lost = sum(length - stay for length, stay in zip(lengths, kept, strict=True))
    segment_b_start = total if second is None else starts[1]
    return Sequences(ids, offsets, segment_b_start), Cut(int((lost > 0).sum()), int(lost.sum()))


def build_pieces(tokenizer: Tokenizer, texts: list[str], length: int, step: int) -> tuple[Sequences, np.ndarray]:
    """`[CLS] piece [SEP]` for overlapping pieces of each text, at most `length` tokens each, `step` tokens apart; and
    the first piece of each text, with their number: (texts + 1,) int64.
    """
    special = tokenizer.special_tokens
    flat, bounds = tokenizer.encode_batch(texts)
    pieces = [list(windows(int(count), length - 2, step)) for count in np.diff(bounds)]
    of_text = ragged.to_offsets(np.array([len(each) for each in pieces]))
    ends = np.array([piece for each in pieces for piece in each])
    counts = ends[:, 1] - ends[:, 0]
    starts = ends[:, 0] + np.repeat(bounds[:-1], np.diff(of_text))
    offsets = ragged.to_offsets(counts + 2)
    ids = np.empty(offsets[-1], np.int64)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = special.classification, special.separator
    ids[ragged.ranges(offsets[:-1] + 1, counts)] = flat[ragged.ranges(starts, counts)]
    return Sequences(ids, offsets, counts + 2), of_text
