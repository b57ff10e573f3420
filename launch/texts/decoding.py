"""Outputs of overlapping windows over a text: in which window each token counts, and the most probable spans."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cloze.pipeline import ragged

Characters = tuple[int, int]
Window = tuple[np.ndarray, np.ndarray, np.ndarray, "list[Characters] | np.ndarray"]
"""Of each token of a window: start and end logits (n,), whether it is of the text (n,), first character and one past
the last (n, 2)."""


def counts_once(windows: list[tuple[int, int]]) -> np.ndarray:
    """Of the tokens of all windows of a text, one window after another, those that count: (sum of lengths,) bool.

    Each token of the text counts in the one window where most stands around it on its poorer side, the first of
    equal ones.

    Args:
        windows: first token and one past the last, of each, in order.

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


def answer_spans(windows: Iterable[Window], candidates: int, max_tokens: int) -> list[tuple[Characters, float]]:
    """The `candidates` best spans of all windows, in characters of the text, with the sums of their logits, the best
    first; a span that stands in several windows has its best score. Tokens without a character begin and end none:
    they are white space. None only for a text without others.
    """
    found: dict[Characters, float] = {}
    for starts, ends, allowed, offsets in windows:
        allowed = allowed & (np.diff(offsets)[:, 0] > 0)
        for (first, last), score in best_spans(starts, ends, allowed, candidates, max_tokens):
            span = int(offsets[first][0]), int(offsets[last][1])
            found[span] = max(score, found.get(span, -np.inf))
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))[:candidates]


def null_score(windows: Iterable[Window]) -> float:
    """What no answer scores: the least sum of [CLS]'s logits among the windows, as in the BERT release."""
    return min(float(starts[0] + ends[0]) for starts, ends, _, _ in windows)


def best_spans(
    starts: np.ndarray, ends: np.ndarray, allowed: np.ndarray, candidates: int, max_tokens: int
) -> list[tuple[tuple[int, int], float]]:
    """Spans (first token, last token) of one window and the sums of their logits.

    starts, ends: (n,) logits. allowed: (n,) bool, tokens of the context. Of the `candidates` best starts and ends all
    pairs in order, of at most `max_tokens` tokens; if none of these is in order, the best of all pairs.
    """
    places = np.flatnonzero(allowed)
    first, last = (places[np.argsort(-logits[places], kind="stable")[:candidates]] for logits in (starts, ends))
    pairs = _in_order(first, last, max_tokens)
    if not len(pairs) and len(places):
        pairs = _in_order(places, places, max_tokens)
        pairs = pairs[[(starts[pairs[:, 0]] + ends[pairs[:, 1]]).argmax()]]
    sums = starts[pairs[:, 0]] + ends[pairs[:, 1]]
    return [((first, last), score) for (first, last), score in zip(pairs.tolist(), sums.tolist(), strict=True)]


def _in_order(firsts: np.ndarray, lasts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Pairs (N, 2) of a first and a last token, the last not before the first and within `max_tokens`."""
    tokens = lasts[None] - firsts[:, None] + 1
    rows, columns = np.nonzero((tokens > 0) & (tokens <= max_tokens))
    return np.stack([firsts[rows], lasts[columns]], 1)
