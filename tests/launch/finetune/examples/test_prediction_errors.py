"""Predictions of classes, counted."""

import numpy as np
import pytest
from sklearn.metrics import multilabel_confusion_matrix

from cloze.launch.finetune.error_analysis import tables
from cloze.launch.finetune.examples import prediction_errors
from tests.launch.finetune.test_error_analysis import Texts, cells


def test_independent_labels_are_counted_as_sklearn_does():
    """Of 40 labels the 30 with the most errors."""
    rng = np.random.default_rng(0)
    true, guessed = rng.random((2, 50, 40)) < rng.uniform(0.1, 0.9, 40)
    names = [f"l{number}" for number in range(40)]

    def named(row) -> list[str]:
        return [name for name, on in zip(names, row, strict=True) if on]

    predictions = [
        {"place": "p", "label": named(a), "prediction": named(b), "probabilities": dict.fromkeys(names, 0.5)}
        for a, b in zip(true, guessed, strict=True)
    ]
    _, *rows = cells(tables(Texts(prediction_errors.LabelErrors), predictions)["confusion"])
    expected = {
        name: [matrix[1, 1], matrix[1, 0], matrix[0, 1], matrix[0, 0]]
        for name, matrix in zip(names, multilabel_confusion_matrix(true, guessed), strict=True)
    }
    errors = sorted((each[1] + each[2] for each in expected.values()), reverse=True)
    assert all(expected[name] == [int(cell) for cell in counts] for name, *counts in rows)
    assert [int(row[2]) + int(row[3]) for row in rows] == errors[:30]


def test_of_very_many_classes_the_pairs_that_are_confused_most():
    pairs = [(str(n), str(n // 2)) for n in range(40)] + [("7", "9")] * 3
    chances = {str(n): 1 / 40 for n in range(40)}
    predictions = [
        {"place": "p", "label": true, "prediction": guessed, "probabilities": chances} for true, guessed in pairs
    ]
    assert cells(tables(Texts(prediction_errors.ClassErrors), predictions)["confusion"])[1] == ["7", "9", "3"]


@pytest.mark.parametrize(
    ("answer", "right", "size"),
    [("the Eiffel Tower", ["Eiffel tower."], None), ("", [], None), ("Rome", ["Paris", "Lyon"], 0.9), ("", ["x"], 0.9)],
)
def test_an_answer_that_counts_as_right_is_no_mistake(answer, right, size):
    """By the official script: articles, case and punctuation don't count."""
    assert prediction_errors.AnswerErrors.error_size({"prediction": answer, "label": right, "probability": 0.9}) == size
