"""Encodes single texts and pairs: truncation, and the place of each token in the text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cloze.launch.texts.settings import TRUNCATION, Answering, Truncation
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer

BLANK = "[MASK]"
# Of a text, whose tokens with their places take some 230 bytes a character: War and Peace has 3.2 million.
_MOST_CHARACTERS = 1 << 22
_HALF = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs: JSON can escape them, UTF-8 cannot represent them


@dataclass(frozen=True)
class Encoding:
    """One sequence `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`; all lists are (n,), one entry per token."""

    ids: list[int]
    segments: list[int]
    """0 up to the first [SEP], then 1."""
    offsets: list[tuple[int, int]]
    """First character and one past the last, in the text that the token is of, without white space around them; (0, 0)
    for special tokens."""
    parts: list[int]
    """0: special token, 1: of the text, 2: of its pair."""
    continues: list[bool]
    """Whether a token goes on with the word of the one before, as the tokenizer cuts words."""
    cut_tokens: int = 0
    """Tokens of the texts that were left out."""
    blanks: tuple[int, ...] = ()
    """Positions at which a token is to be guessed: a model sees [MASK] there, whatever the id is."""
    first_token: int = 0
    """Number of tokens of the text before the window."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segment_b_start(self) -> int:
        """First position of the second segment; the length if there is none."""
        return len(self.ids) - sum(self.segments)


@dataclass(frozen=True)
class _Tokens:
    """Tokens of one text, without special tokens around it."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    continues: list[bool]
    blanks: tuple[int, ...] = ()

    def __getitem__(self, part: slice) -> _Tokens:
        return replace(self, ids=self.ids[part], offsets=self.offsets[part], continues=self.continues[part])

    def ends(self, head: int, tail: int) -> _Tokens:
        first, last = self[:head], self[len(self.ids) - tail :]
        return _Tokens(first.ids + last.ids, first.offsets + last.offsets, first.continues + last.continues)


def spelled_specials(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Finds special tokens that are spelled in a text, where their characters are text."""
    return re.compile("|".join(map(re.escape, tokenizer.names.values())))


class TextEncoder:
    """Encodes texts with special tokens, within `max_length` tokens in all.

    longer_texts: number of texts encoded whole that were longer than the model's training texts.
    spelled_specials: number of texts in which a special token is spelled ("title [SEP] abstract"): its characters are
        text here, where transformers would read the token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        pieces: tuple[int, int] | None = None,
        truncation: Truncation | None = None,
        answering: Answering | None = None,
        refused_pairs: str | None = None,
    ) -> None:
        """An encoder of texts for one model.

        Args:
            pieces: length and step of the pieces in which a model classifies long texts; None: it truncates them.
            truncation: how; None: tokens beyond `max_length` are cut off.
            answering: how the model was trained to answer questions; None: defaults.
            refused_pairs: the message with which pairs are refused; None: they are encoded.

        Raises:
            UserError: truncated texts would be longer than `max_length`.
        """
        self._refused_pairs = refused_pairs
        self.tokenizer, self.max_length, self.pieces = tokenizer, max_length, pieces
        self.truncation = truncation or Truncation(max_length)
        if self.truncation.max_length > max_length:
            raise UserError(
                f"{TRUNCATION}.max_length: found {self.truncation.max_length}, expected at most {max_length}, the "
                "model's positions; fix its config.json"
            )
        self.answering = answering or Answering()
        self.longer_texts = self.spelled_specials = 0
        self._special = spelled_specials(tokenizer)
        # A blank is written as [MASK], or as the tokenizer's mask token.
        self._blank = re.compile("|".join(re.escape(name) for name in (BLANK, tokenizer.names["mask"])))

    @property
    def takes_pairs(self) -> bool:
        """Whether two texts can be encoded together."""
        return self._refused_pairs is None and self.pieces is None

    def has_blank(self, text: str) -> bool:
        return bool(self._blank.search(text))

    def encode(
        self, text: str, pair: str | None = None, *, cut: bool = False, blanks: bool = False, place: str = "text"
    ) -> Encoding:
        """Encode a text or a pair.

        Args:
            cut: long texts are truncated as in the model's training, counted in `cut_tokens`.
            blanks: [MASK] is a mask token, not text.
            place: source of the text, for messages.

        Raises:
            UserError: a text is empty, lacks a required blank, or is too long and `cut` is false.
        """
        texts = [text] if pair is None else [text, pair]
        parts = [self._tokens(each, blanks, place) for each in texts]
        if blanks and not any(part.blanks for part in parts):
            raise UserError(f"{place}: found no {BLANK} in {_shown(text)}, expected at least one blank to fill")
        lengths = [len(part.ids) for part in parts]
        total = 1 + sum(length + 1 for length in lengths)
        if total <= (self.truncation.max_length if cut else self.max_length):
            self.longer_texts += total > self.truncation.max_length
            return self._join(parts)
        if not cut:
            raise UserError(
                f"{place}: found {total} tokens, expected at most {self.max_length}, the model's "
                "positions; shorten the text"
            )
        ends = self.truncation.ends([np.array(length) for length in lengths])
        kept = self._join([part.ends(*map(int, each)) for part, each in zip(parts, ends, strict=True)])
        return replace(kept, cut_tokens=total - len(kept))

    def windows(
        self, text: str, question: str | None = None, *, length: int, step: int, place: str = "text"
    ) -> Iterator[Encoding]:
        """Encode a text of any length in windows of at most `length` tokens, special tokens and question included; each
        begins `step` tokens after the one before, or fewer if the windows would leave a gap.

        Raises:
            UserError: a text is empty, or the question leaves no room for the text.
        """
        first = None if question is None else self._tokens(question, False, place)
        tokens = self._tokens(text, False, place)
        room = min(length, self.max_length) - (2 if first is None else 3 + len(first.ids))
        if room < 1:
            raise UserError(
                f"{place}: found a question that leaves no room for its text in "
                f"{min(length, self.max_length)} tokens; shorten the question"
            )
        before = [] if first is None else [first]
        return (
            replace(self._join([*before, tokens[start:end]]), first_token=start)
            for start, end in windows(len(tokens.ids), room, min(step, room))
        )

    def _tokens(self, text: str, blanks: bool, place: str) -> _Tokens:
        """Tokens of a text, at least one. The tokenizer would encode [MASK] as text, so the parts between blanks are
        encoded separately.
        """
        if len(text) > _MOST_CHARACTERS:
            raise UserError(
                f"{place}: found a text of {len(text):,} characters, expected at most {_MOST_CHARACTERS:,}; divide it"
            )
        if half := half_character(text):
            raise UserError(f"{place}: found {half}, expected whole characters; fix the text")
        if self.truncation.words == "characters":
            tokens = self._character_tokens(text)
        else:
            tokens = self._blank_tokens(text) if blanks else _Tokens(*self.tokenizer.encode_with_offsets([text])[0])
        if not text.strip() or not tokens.ids:  # a normaliser removes control and zero-width characters
            raise UserError(f"{place}: found an empty text ({_shown(text)}), expected at least one word; leave it out")
        self.spelled_specials += bool(self._special.search(self._blank.sub("", text) if blanks else text))
        return tokens

    def _character_tokens(self, text: str) -> _Tokens:
        """Tokens of each character encoded separately, as in a tagger's training; [UNK] for a character without
        tokens.
        """
        ids, offsets, continues = [], [], []
        spans = characters(text)
        for span, located in zip(
            spans, self.tokenizer.encode_with_offsets([text[low:high] for low, high in spans]), strict=True
        ):
            tokens = located.ids or [self.tokenizer.special_tokens.unknown]
            ids += tokens
            offsets += [span] * len(tokens)
            continues += [number > 0 for number in range(len(tokens))]
        return _Tokens(ids, offsets, continues)

    def _blank_tokens(self, text: str) -> _Tokens:
        """Tokens of a text with blanks. If the tokenizer includes the space before a word, a mask replaces both, as in
        pretraining.
        """
        ids, offsets, continues, places, start = [], [], [], [], 0
        blanks = [match.span() for match in self._blank.finditer(text)]
        for low, high in [*blanks, (len(text), None)]:
            piece = text[start:low]
            if high is not None and self.tokenizer.space_begins_word:
                piece = piece.removesuffix(" ")
            (located,) = self.tokenizer.encode_with_offsets([piece])
            ids += located.ids
            offsets += [(start + first, start + last) for first, last in located.offsets]
            continues += located.continues
            if high is not None:
                places.append(len(ids))
                ids.append(self.tokenizer.special_tokens.mask)
                offsets.append((low, high))
                continues.append(False)
                start = high
        return _Tokens(ids, offsets, continues, tuple(places))

    def _join(self, parts: list[_Tokens]) -> Encoding:
        """Special tokens around one or two texts, as `cloze.pipeline.samples.assembly` puts them around arrays."""
        if self._refused_pairs and len(parts) == 2:
            raise UserError(self._refused_pairs)
        special = self.tokenizer.special_tokens
        ids, segments, offsets, kinds, continues = [special.classification], [0], [(0, 0)], [0], [False]
        blanks = []
        for number, part in enumerate(parts):
            blanks += [len(ids) + place for place in part.blanks]
            ids += [*part.ids, special.separator]
            segments += [number] * (len(part.ids) + 1)
            offsets += [*part.offsets, (0, 0)]
            kinds += [number + 1] * len(part.ids) + [0]
            continues += [*part.continues, False]
        return Encoding(ids, segments, offsets, kinds, continues, blanks=tuple(blanks))


def windows(num_tokens: int, length: int, step: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of windows over `num_tokens` tokens; the last one reaches the end.

    >>> list(windows(12, 6, 3))
    [(0, 6), (3, 9), (6, 12)]
    """
    start = 0
    while True:
        yield start, min(start + length, num_tokens)
        if start + length >= num_tokens:
            return
        start += step


def characters(text: str) -> list[tuple[int, int]]:
    """Start and end of each character except white space; a combining mark belongs to the character before it."""
    begins = [place for place, each in enumerate(text) if place == 0 or unicodedata.category(each)[0] != "M"]
    ends = [*begins[1:], len(text)] if begins else []
    return [(low, high) for low, high in zip(begins, ends, strict=True) if not text[low].isspace()]


def half_character(text: str) -> str | None:
    """Describes the lone surrogate in a text that UTF-8 cannot represent; None if there is none."""
    half = _HALF.search(text)
    return half and f"{half[0]!r}, half of a character, in {_shown(text)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
