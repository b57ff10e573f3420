"""Metrics by their usual names, computed by scikit-learn, scipy and seqeval."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install

try:
    import sklearn.metrics as sklearn_metrics
    from scipy import stats
except ImportError:
    sklearn_metrics = stats = None


def check_installed() -> None:
    """Raise UserError if the libraries of the extra are missing."""
    if sklearn_metrics is None:
        raise UserError(f"cloze finetune: the libraries that compute metrics are missing; {how_to_install('finetune')}")


def _f1(average: str) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda true, guessed: sklearn_metrics.f1_score(true, guessed, average=average, zero_division=0.0)


def _correlation(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
    def measure(true: np.ndarray, guessed: np.ndarray) -> float:
        if len(true) < 2:
            return math.nan
        with warnings.catch_warnings():  # scipy's warning for constant predictions, whose correlation is NaN
            warnings.simplefilter("ignore", stats.ConstantInputWarning)
            return getattr(stats, name)(true, guessed).statistic

    return measure


# Each takes true and predicted values: class indices (N,), values (N,), or for independent labels 0 and 1 (N, labels).
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda true, guessed: np.mean(true == guessed),
    "exact_match": lambda true, guessed: np.mean((true == guessed).all(1)),  # all labels of an example must be right
    "f1": _f1("binary"),  # F1 of the second class, as GLUE measures MRPC and QQP
    "f1_macro": _f1("macro"),
    "f1_micro": _f1("micro"),
    "matthews_correlation": lambda true, guessed: sklearn_metrics.matthews_corrcoef(true, guessed),
    "pearson": _correlation("pearsonr"),
    "spearman": _correlation("spearmanr"),
    "mean_squared_error": lambda true, guessed: np.mean((true - guessed) ** 2),
}


def explained(names: tuple[str, ...], meanings: dict[str, str]) -> str:
    """Metrics in one line, each with its explanation if there is one."""
    return ", ".join(f"{name} ({meanings[name]})" if name in meanings else name for name in names)


def measure(names: tuple[str, ...], true: np.ndarray, guessed: np.ndarray) -> dict[str, float]:
    """Metrics by name."""
    return {name: float(METRICS[name](true, guessed)) for name in names}


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each of the values (N,), from 1 for the least; equal values get their mean rank."""
    return stats.rankdata(values)


# Metrics of retrieval; the first one selects the best checkpoint. NAME@k counts only the first k ranks.
RETRIEVAL = ("ndcg_at_10", "recall_at_1", "recall_at_5", "recall_at_10")
_QUERIES = 256  # number of queries whose scores of all documents are computed at once


class Ranked(NamedTuple):
    """Result of a query."""

    ranks: np.ndarray
    """Ranks of the right documents, from 1, in the order in which they were named: (documents,) int64."""
    nearest: int
    """Index of the document that is ranked first."""


def ranked(
    queries: np.ndarray, documents: np.ndarray, without: np.ndarray, right: Sequence[np.ndarray]
) -> list[Ranked]:
    """Documents ranked by their dot product with each query; of equal ones the earlier comes first, and one whose
    product is not a number is the last.

    Args:
        queries: (Q, size). documents: (D, size).
        without: (Q,) int64: index of a document that is excluded for a query, -1: none.
        right: for each query the indices of its right documents, at least one.
    """
    found = []
    for start in range(0, len(queries), _QUERIES):
        scores = queries[start : start + _QUERIES] @ documents.T
        for query, row in enumerate(scores, start):
            if without[query] >= 0:
                row[without[query]] = -np.inf
            ranks = [
                len(row)
                if np.isnan(row[place])
                else 1 + np.count_nonzero(row > row[place]) + np.count_nonzero(row[:place] == row[place])
                for place in right[query]
            ]
            found.append(Ranked(np.array(ranks), int(np.nan_to_num(row, nan=-np.inf).argmax())))
    return found


def measure_ranks(ranks: Sequence[np.ndarray]) -> dict[str, float]:
    """Means over queries from the ranks of their right documents: the share of these among the first k; and the
    normalised discounted cumulative gain of the first ten with gain 1 for each right document (Jarvelin and Kekalainen
    2002).
    """
    gains = [
        (1 / np.log2(1 + each[each <= 10])).sum() / (1 / np.log2(1 + np.arange(1, min(len(each), 10) + 1))).sum()
        for each in ranks
    ]
    recalls = {f"recall_at_{most}": float(np.mean([np.mean(each <= most) for each in ranks])) for most in (1, 5, 10)}
    return {"ndcg_at_10": float(np.mean(gains)), **recalls}
