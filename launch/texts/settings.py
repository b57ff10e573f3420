"""What a model saves in its config.json of how it was trained to read texts: truncation, windows, pooling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from cloze.model.config import VectorPooling
from cloze.pipeline.bounds import bounds, check_bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

TRUNCATION = "cloze_truncation"  # entry of a model's config.json: the fields of a Truncation that are not None
ANSWERING = "cloze_answering"  # another one: those of an Answering
VECTORS = "cloze_vectors"  # and those of a Vectors


@dataclass(frozen=True)
class Truncation:
    """How long texts are truncated, and what counts as a word: saved with the model, the same in training and in
    use.
    """

    max_length: int = field(metadata=bounds(at_least=3))  # of two texts the special tokens alone
    """Tokens of a sequence, special tokens included."""
    keep: Literal["head", "tail", "head_tail"] = "head"
    """What stays of a text: its head, its tail, or head_tail: the first `head_tokens`, and as many of the last as there
    is room for (Sun et al. 2019, arXiv 1905.05583)."""
    head_tokens: int = field(default=128, metadata=bounds(at_least=1))
    words: Literal["characters"] | None = None
    """characters: each is a word of its own, as in what a tagger of Chinese has learned from; None: the tokenizer's."""

    def __post_init__(self) -> None:
        check_bounds(TRUNCATION, self)

    def ends(self, lengths: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Number of tokens kept at the beginning and at the end, of texts or of both sides of pairs, with (N,) tokens
        each.
        """
        room = self.max_length - 1 - len(lengths)
        kept = [np.minimum(lengths[0], room)] if len(lengths) == 1 else kept_lengths(lengths[0], lengths[1], room)
        return [self._ends(*side) for side in zip(lengths, kept, strict=True)]

    def _ends(self, length: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        heads: dict[str, np.ndarray | int] = {"head": kept, "tail": 0, "head_tail": self.head_tokens}
        longest_head = heads[self.keep]
        head = np.where(kept < length, np.minimum(kept, longest_head), kept)
        return head, kept - head


def words_in(note: object) -> Literal["characters"] | None:
    """The words of a Truncation by its entry of config.json.

    Raises:
        UserError: the entry has other words.
    """
    words = note.get("words") if isinstance(note, dict) else note
    if words not in (None, "characters"):
        raise UserError(f"{TRUNCATION}: found {note!s:.60}, expected the fields of a model that Cloze has trained")
    return "characters" if words else None


def described(truncation: Truncation) -> Fields:
    """The entry of config.json."""
    return {name: value for name, value in asdict(truncation).items() if value is not None}


def kept_lengths(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Number of tokens kept of two texts (N,) each that share `room`: the longer one is truncated, as in `tokenizers`
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


@dataclass(frozen=True)
class Answering:
    """How answers are found in a text: saved with the model, the same in training and in use. Defaults: the BERT
    release.
    """

    max_length: int = field(default=384, metadata=bounds(at_least=1))
    """Tokens of a window of the text, the question and special tokens included; at most the model's positions."""
    window_step: int = field(default=128, metadata=bounds(at_least=1))
    """Tokens between the starts of two windows."""
    max_answer_tokens: int = field(default=30, metadata=bounds(at_least=1))
    """Longest answer."""
    allow_no_answer: bool = False
    """Whether a question may have none."""

    def __post_init__(self) -> None:
        check_bounds(ANSWERING, self)


@dataclass(frozen=True)
class Vectors:
    """How the vectors of the tokens are pooled to the vector of a text: saved with the model, the same in training and
    in use.
    """

    pooling: VectorPooling = "mean"
    """The vector of [CLS], or mean or maximum over all tokens, special ones included."""
    normalize: bool = False
    """Whether it is divided by its length."""


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Vectors (..., size) divided by their norms; zero vectors stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
