"""Metrics of ranked texts."""

import math

import numpy as np
import pytest

from cloze.launch.config.metrics import MEASURES
from cloze.launch.finetune import scoring
from cloze.launch.finetune.tasks import TASKS


def test_ranks_and_what_is_made_of_them():
    """Three right documents of five, a tie, and one that does not count."""
    queries, documents = np.array([[1.0, 0.0]]), np.array([[0.9, 0], [1.0, 0], [0.5, 0], [0.5, 0], [0.1, 0]])
    (found,) = scoring.ranked(queries, documents, np.array([1]), [np.array([0, 3, 4])])
    assert found.ranks.tolist() == [1, 3, 4] and found.nearest == 0
    gain = (1 + 1 / math.log2(4) + 1 / math.log2(5)) / (1 + 1 / math.log2(3) + 1 / math.log2(4))
    assert scoring.measure_ranks([found.ranks]) == pytest.approx(
        {"ndcg_at_10": gain, "recall_at_1": 1 / 3, "recall_at_5": 1.0, "recall_at_10": 1.0}
    )
    assert scoring.measure_ranks([np.array([11])]) == {
        "ndcg_at_10": 0.0,
        "recall_at_1": 0.0,
        "recall_at_5": 0.0,
        "recall_at_10": 0.0,
    }


def test_vectors_that_are_no_numbers_find_nothing():
    """NaN is neither above nor below: as the first of all a run that has diverged would have been the best."""
    (found,) = scoring.ranked(np.full((1, 2), np.nan), np.ones((30, 2)), np.array([-1]), [np.array([0])])
    assert scoring.measure_ranks([found.ranks])["recall_at_10"] == 0.0
    documents = np.array([[np.nan, 0.0], [0.0, 1.0], [1.0, 0.0]])
    (found,) = scoring.ranked(np.array([[1.0, 0.0]]), documents, np.array([-1]), [np.array([2])])
    assert found.nearest == 2 and found.ranks.tolist() == [1]


def test_every_metric_of_a_task_is_a_measure():
    of_tasks = {name for task in TASKS.values() for name in task.metrics}
    missing = {*scoring.METRICS, *scoring.RETRIEVAL, *of_tasks} - MEASURES.keys()
    assert not missing, f"MEASURES in launch/config/metrics.py has no entry for {missing}"
