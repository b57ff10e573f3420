"""`[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`: the one place where special tokens are put around arrays of token ids.

`cloze.launch.texts.encoding` does the same for a single text with the place of each token in it, in Python, where the
arrays of one row would take longer than their contents; tests/pipeline/samples/test_assembly.py compares both.
"""

from collections.abc import Sequence

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.records import SpecialTokens

Range = tuple[np.ndarray, np.ndarray]
"""Starts and lengths of N ranges of tokens, int64 (N,) each."""


def assemble(
    tokens: np.ndarray, sides: Sequence[Sequence[Range]], special: SpecialTokens, has_second: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N sequences of one or two texts each, in one gather.

    Args:
        tokens: ids (T,), any integer type, without special tokens.
        sides: for A, or for A and B, the consecutive ranges of `tokens` that form it.
        has_second: bool (N,): whether there is a B, which ends in [SEP] even if it is empty; None: in every row.

    Returns:
        ids (tokens in all,) of the type of `tokens`; offsets (N+1,) int64; the first position of B, or the length if
        there is none, int64 (N,).
    """
    classification, separator = len(tokens), len(tokens) + 1  # their indices after the tokens
    extended = np.concatenate([tokens, np.array([special.classification, special.separator], tokens.dtype)])
    one = np.ones(len(sides[0][0][0]), np.int64)
    starts, lengths, ends = [classification * one], [one], []
    for number, side in enumerate(sides):
        for begins, counts in side:
            starts.append(begins)
            lengths.append(counts)
        starts.append(separator * one)
        lengths.append(one if number == 0 or has_second is None else has_second.astype(np.int64))
        ends.append(len(lengths))
    bounds, counts = np.stack(starts, axis=1), np.stack(lengths, axis=1)
    ids = ragged.gather(extended, bounds.ravel(), counts.ravel())
    return ids, ragged.to_offsets(counts.sum(axis=1)), counts[:, : ends[0]].sum(axis=1)
