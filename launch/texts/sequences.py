"""Encodes many texts to arrays of token ids with special tokens, and counts what was truncated."""

from dataclasses import dataclass

import numpy as np

from cloze.launch.texts.encoding import windows
from cloze.launch.texts.settings import Truncation
from cloze.pipeline import ragged
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.loading.collate import concatenated
from cloze.pipeline.samples.assembly import assemble
from cloze.pipeline.tokenization.tokenizer import Tokenizer


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

    def batch(self, rows: np.ndarray, segments: tuple[int, int]) -> MicroBatch:
        """Inputs of a model's forward for some sequences, without targets."""
        offsets = ragged.to_offsets(self.lengths[rows])
        (batch,) = concatenated(
            self.input_ids[self.tokens(rows)], offsets, self.segment_b_start[rows], np.array([len(rows)]), segments
        )
        return batch


@dataclass(frozen=True)
class Cut:
    """Counts of truncated sequences and tokens."""

    sequences: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.sequences:,} cut by {self.tokens:,} tokens in all" if self.sequences else "none cut"


def build_sequences(
    tokenizer: Tokenizer, first: list[str], second: list[str] | None, truncation: Truncation
) -> tuple[Sequences, Cut]:
    """Sequences `[CLS] A [SEP]`, or with a second list `[CLS] A [SEP] B [SEP]`, truncated by `truncation`."""
    sides = [tokenizer.encode_batch(texts) for texts in ([first] if second is None else [first, second])]
    lengths = [np.diff(offsets) for _, offsets in sides]
    ends = truncation.ends(lengths)
    tokens = np.concatenate([flat for flat, _ in sides]).astype(np.int64)
    ranges, before = [], 0
    for (flat, bounds), (head, tail) in zip(sides, ends, strict=True):
        ranges.append([(before + bounds[:-1], head), (before + bounds[1:] - tail, tail)])
        before += len(flat)
    lost = sum(length - head - tail for length, (head, tail) in zip(lengths, ends, strict=True))
    return Sequences(*assemble(tokens, ranges, tokenizer.special_tokens)), Cut(int((lost > 0).sum()), int(lost.sum()))


def build_pieces(tokenizer: Tokenizer, texts: list[str], length: int, step: int) -> tuple[Sequences, np.ndarray]:
    """Sequences `[CLS] piece [SEP]` for overlapping pieces of each text, at most `length` tokens each, `step` tokens
    apart; and the offsets of each text's pieces, (texts + 1,) int64.
    """
    flat, bounds = tokenizer.encode_batch(texts)
    pieces = [list(windows(int(count), length - 2, step)) for count in np.diff(bounds)]
    of_text = ragged.to_offsets(np.array([len(each) for each in pieces]))
    ends = np.array([piece for each in pieces for piece in each])
    counts = ends[:, 1] - ends[:, 0]
    starts = ends[:, 0] + np.repeat(bounds[:-1], np.diff(of_text))
    return Sequences(*assemble(flat.astype(np.int64), [[(starts, counts)]], tokenizer.special_tokens)), of_text
