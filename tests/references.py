"""What several tests compare with: restated from definitions, and independent of Cloze."""

from __future__ import annotations

import re
import string
from collections import Counter


def official_words(text: str) -> list[str]:
    """SQuAD's normal form in both official scripts, from its definition: small letters, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def official_f1(prediction: str, truth: str, version: int) -> float:
    """F1 as SQuAD's evaluate-v1.1.py and evaluate-v2.0.py define it, restated."""
    guessed, true = official_words(prediction), official_words(truth)
    if version == 2 and (not guessed or not true):
        return float(guessed == true)
    same = sum((Counter(guessed) & Counter(true)).values())
    if not same:
        return 0.0
    precision, recall = same / len(guessed), same / len(true)
    return 2 * precision * recall / (precision + recall)


def best_window(windows: list[tuple[int, int]], token: int) -> int:
    """Where a token counts: with most context on its poorer side; in the first of equal ones."""
    scores = [min(token - first, end - 1 - token) if first <= token < end else -1 for first, end in windows]
    return scores.index(max(scores))
