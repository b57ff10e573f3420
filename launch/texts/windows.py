"""Outputs of overlapping windows over a text: in which window each token counts, and the most probable spans."""

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from cloze.pipeline import ragged

Characters = tuple[int, int]
Window = tuple[np.ndarray, np.ndarray, np.ndarray, "list[Characters] | np.ndarray"]
"""Of each token of a window: start and end logits (n,), whether it is of the text (n,), first character and one past
the last (n, 2)."""


def counts_once(windows: list[tuple[int, int]]) -> np.ndarray:
    """Mask of the tokens to use, over all windows of a text one after another: (sum of lengths,) bool.

    Each token of the text is used in the window where its smaller context (left or right) is largest; of equal windows
    the first.

    Args:
        windows: token range (end exclusive) of each window, in order.

    >>> counts_once([(0, 4), (2, 6)]).astype(int)
    array([1, 1, 1, 0, 0, 1, 1, 1])
    """
    firsts, ends = (np.array(part) for part in zip(*windows, strict=True))
    lengths = ends - firsts
    within = ragged.within(ragged.to_offsets(lengths))
    token = within + np.repeat(firsts, lengths)
    context = np.minimum(within, np.repeat(lengths, lengths) - 1 - within)
    order = np.lexsort((-context, token))  # stable: the first window of equal ones stays first
    chosen = np.zeros(len(token), bool)
    chosen[order[np.diff(token[order], prepend=-1) != 0]] = True
    return chosen


def answer_spans(
    text: str, windows: Sequence[Window], candidates: int, max_tokens: int
) -> list[tuple[Characters, float]]:
    """The `candidates` best spans of all windows, in characters of the text, with the sums of their logits, best first;
    a span found in several windows has its best score. As in the BERT release, spans neither begin nor end inside a
    word, unless all do. Tokens without a character (white space) neither begin nor end a span. Empty only for a text
    without other tokens.
    """
    inside, behind = inside_words(text), _behind_marks(text, windows)
    return _answer_spans(windows, candidates, max_tokens, inside, behind) or _answer_spans(
        windows, candidates, max_tokens, np.zeros_like(inside), behind
    )


def _answer_spans(
    windows: Iterable[Window], candidates: int, max_tokens: int, inside: np.ndarray, behind: np.ndarray
) -> list[tuple[Characters, float]]:
    """The same without spans that begin or end at a place where `inside` is true; a token's end goes on to the place
    that `behind` has for it.
    """
    spans: dict[Characters, float] = {}
    for starts, ends, allowed, offsets in windows:
        firsts, lasts = np.asarray(offsets).T
        allowed = allowed & (lasts > firsts)
        # others are positions in the question
        firsts, lasts = np.where(allowed, firsts, 0), behind[np.where(allowed, lasts, 0)]
        sides = allowed & ~inside[firsts], allowed & ~inside[lasts]
        for (first, last), score in best_spans(starts, ends, *sides, candidates, max_tokens):
            span = int(firsts[first]), int(lasts[last])
            spans[span] = max(score, spans.get(span, -np.inf))
    return sorted(spans.items(), key=lambda item: (-item[1], item[0]))[:candidates]


def _behind_marks(text: str, windows: Sequence[Window]) -> np.ndarray:
    """(characters + 1,) int64: for each place that behind the marks there which are of no token: those of letters in
    decomposed form, and vowel signs, of a tokenizer that strips accents.
    """
    places = np.arange(len(text) + 1)
    marks = np.array([*(unicodedata.category(each)[0] == "M" for each in text), False])
    if marks.any():
        begun = np.zeros(len(text) + 1, np.int64)
        for _, _, allowed, offsets in windows:
            firsts, lasts = np.asarray(offsets)[allowed].T
            np.add.at(begun, firsts, 1)
            np.add.at(begun, lasts, -1)
        for place in np.flatnonzero(marks & (begun.cumsum() == 0))[::-1]:
            places[place] = places[place + 1]
    return places


def inside_words(text: str) -> np.ndarray:
    """(characters + 1,) bool: whether the place before each character is inside a word, between cased letters or
    digits. Scripts without case are excluded, since many of them do not separate words by spaces.

    >>> inside_words("a bc").astype(int)
    array([0, 0, 0, 1, 0])
    """
    of_word = np.array(
        [
            False,
            *(
                each.islower()
                or each.isupper()
                or each.istitle()
                or each.isdecimal()
                or bool(unicodedata.combining(each))
                for each in text
            ),
            False,
        ]
    )
    return of_word[:-1] & of_word[1:]


def null_score(windows: Iterable[Window]) -> float:
    """Score of no answer: the minimum over windows of the sum of [CLS]'s logits, as in the BERT release."""
    return min(float(starts[0] + ends[0]) for starts, ends, _, _ in windows)


def is_unanswered(odds: float) -> bool:
    """Whether there is no answer, by its score less that of the best span: an equal one is an answer, as in SQuAD 2.0's
    evaluation, whose threshold is 0.
    """
    return odds > 0


def best_spans(
    starts: np.ndarray, ends: np.ndarray, may_start: np.ndarray, may_end: np.ndarray, candidates: int, max_tokens: int
) -> list[tuple[tuple[int, int], float]]:
    """Spans (first token, last token) of one window and the sums of their logits.

    From the `candidates` best starts and ends all ordered pairs of at most `max_tokens` tokens; if there are none, the
    best of all ordered pairs.

    Args:
        starts, ends: (n,) logits.
        may_start, may_end: (n,) bool, tokens of the context.
    """
    every = np.flatnonzero(may_start), np.flatnonzero(may_end)
    first, last = (
        places[np.argsort(-logits[places], kind="stable")[:candidates]]
        for places, logits in zip(every, (starts, ends), strict=True)
    )
    pairs = _in_order(first, last, max_tokens)
    if not len(pairs) and len(pairs := _in_order(*every, max_tokens)):
        pairs = pairs[[(starts[pairs[:, 0]] + ends[pairs[:, 1]]).argmax()]]
    sums = starts[pairs[:, 0]] + ends[pairs[:, 1]]
    return [((first, last), score) for (first, last), score in zip(pairs.tolist(), sums.tolist(), strict=True)]


def _in_order(firsts: np.ndarray, lasts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Pairs (N, 2) of a first and a last token, the last not before the first and within `max_tokens`."""
    tokens = lasts[None] - firsts[:, None] + 1
    rows, columns = np.nonzero((tokens > 0) & (tokens <= max_tokens))
    return np.stack([firsts[rows], lasts[columns]], 1)
