"""Overlapping windows over long texts: where they begin, and in which of them a token counts."""

from __future__ import annotations

import numpy as np

from pipeline import ragged

_LENGTH_BONUS = 0.01  # of a token of the window: as in the BERT release (run_squad.py, _check_is_max_context)


def windows_of(num_tokens: int, length: int, step: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each window: `length` tokens, `step` apart, until the last token is in one.

    >>> windows_of(12, 6, 3)
    [(0, 6), (3, 6), (6, 6)]
    """
    firsts = range(0, max(num_tokens - length, 0) + step, step) if num_tokens > length else range(1)
    return [(first, min(length, num_tokens - first)) for first in firsts]


def counts_once(windows: list[tuple[int, int]]) -> np.ndarray:
    """Of the tokens of all windows of a text, one window after another, those that count: (sum of counts,) bool.

    Each token of the text counts in the one window where most stands around it on its poorer side, the first of
    equal ones, as in the BERT release.

    >>> counts_once([(0, 4), (2, 4)]).astype(int)
    array([1, 1, 1, 0, 0, 1, 1, 1])
    """
    firsts, counts = (np.array(part) for part in zip(*windows, strict=True))
    within = ragged.within(ragged.to_offsets(counts))
    token = within + np.repeat(firsts, counts)
    context = np.minimum(within, np.repeat(counts, counts) - 1 - within) + _LENGTH_BONUS * np.repeat(counts, counts)
    order = np.lexsort((np.arange(len(token)), -context, token))
    chosen = np.zeros(len(token), bool)
    chosen[order[np.diff(token[order], prepend=-1) != 0]] = True
    return chosen
