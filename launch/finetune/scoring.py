"""Metrics by their usual names: scikit-learn, scipy and seqeval compute them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

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
        with warnings.catch_warnings():  # of constant predictions, which correlate with nothing: NaN says so
            warnings.simplefilter("ignore", stats.ConstantInputWarning)
            return getattr(stats, name)(true, guessed).statistic

    return measure


# Each takes what is true and what was guessed: numbers of classes (N,), values (N,), or for independent labels 0 and 1
# (N, labels).
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda true, guessed: np.mean(true == guessed),
    "exact_match": lambda true, guessed: np.mean((true == guessed).all(1)),  # all labels of an example
    "f1": _f1("binary"),  # of the second class, as GLUE measures MRPC and QQP
    "f1_macro": _f1("macro"),
    "f1_micro": _f1("micro"),
    "matthews_correlation": lambda true, guessed: sklearn_metrics.matthews_corrcoef(true, guessed),
    "pearson": _correlation("pearsonr"),
    "spearman": _correlation("spearmanr"),
    "mean_squared_error": lambda true, guessed: np.mean((true - guessed) ** 2),
}


def explained(names: tuple[str, ...], meanings: dict[str, str]) -> str:
    """Metrics in one line, with a word on each that has one."""
    return ", ".join(f"{name} ({meanings[name]})" if name in meanings else name for name in names)


def measure(names: tuple[str, ...], true: np.ndarray, guessed: np.ndarray) -> dict[str, float]:
    """Metrics by name."""
    return {name: float(METRICS[name](true, guessed)) for name in names}
