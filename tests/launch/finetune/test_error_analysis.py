"""Confused classes, and the examples that a model was surest and wrong about."""

from collections import Counter

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from cloze.launch.finetune import error_analysis
from cloze.launch.finetune.error_analysis import tables
from cloze.launch.finetune.examples import prediction_errors
from cloze.launch.finetune.examples.prediction_errors import Confusion
from tests.launch.finetune.running import cells


def entries(kind: str) -> list[dict]:
    """Predictions as each kind of task describes them, the first one right, the others ever more wrong."""
    if kind == "columns":
        chances = [{"size": {"s": p, "l": 1 - p}, "kind": {"a": 0.6, "b": 0.4}} for p in (0.9, 0.4, 0.1)]
        return [
            {
                "place": f"row {n}",
                "label": {"size": "s", "kind": "a"},
                "probabilities": each,
                "prediction": {"size": max(each["size"], key=each["size"].get), "kind": "a"},
            }
            for n, each in enumerate(chances)
        ]
    if kind == "labels":
        return [
            {
                "place": f"row {n}",
                "label": ["x"],
                "prediction": ["x", "y"] if p > 0.5 else ["x"],
                "probabilities": {"x": 0.8, "y": p},
            }
            for n, p in enumerate((0.1, 0.6, 0.9))
        ]
    if kind == "numbers":
        return [{"place": f"row {n}", "label": 2.0, "prediction": 2.0 + n} for n in range(3)]
    if kind == "tags":
        return [
            {
                "place": f"row {n}",
                "words": ["a", "b"],
                "label": ["O", "B-x"],
                "prediction": ["O", tag],
                "probabilities": [0.9, p],
            }
            for n, (tag, p) in enumerate([("B-x", 0.7), ("O", 0.5), ("O", 0.8)])
        ]
    return [
        {"id": f"row {n}", "label": ["yes"], "prediction": text, "probability": p}
        for n, (text, p) in enumerate([("yes", 0.9), ("no", 0.3), ("well", 0.5)])
    ]


KINDS = {
    "columns": prediction_errors.ColumnErrors,
    "labels": prediction_errors.LabelErrors,
    "numbers": prediction_errors.NumberErrors,
    "tags": prediction_errors.TagErrors,
    "answers": prediction_errors.AnswerErrors,
}


class Texts:
    """Of examples, what the tables need."""

    def __init__(self, kind) -> None:
        self.errors = kind

    def text(self, number: int) -> str:
        return f"the | text\n{number}"


@pytest.mark.parametrize(
    "kind, confusions",
    [
        (
            "columns",
            {
                # in the order of the model's labels, not of the alphabet
                "confusion size": [["true \\ predicted", "s", "l"], ["s", "1", "2"], ["l", "0", "0"]],
                "confusion kind": [["true \\ predicted", "a"], ["a", "3"]],
            },
        ),
        (
            "labels",
            {
                "confusion": [
                    ["label", "true and predicted", "true, not predicted", "predicted, not true", "neither"],
                    ["x", "3", "0", "0", "0"],
                    ["y", "0", "0", "2", "1"],
                ]
            },
        ),
        ("numbers", {}),
        ("answers", {}),
        ("tags", {"confusion": [["true \\ predicted", "B-x", "O"], ["B-x", "1", "2"], ["O", "0", "3"]]}),
    ],
)
def test_every_kind_of_task_has_its_tables(kind, confusions):
    found = tables(Texts(KINDS[kind]), entries(kind))
    worst = cells(found.pop("worst"))
    assert [row[0] for row in worst[1:]] == ["row 2", "row 1"] and worst[1][1] == "the \\| text 2"
    assert {name: cells(table) for name, table in found.items()} == confusions
    assert KINDS[kind].binary_scores(entries(kind)) is None


def test_each_row_shows_its_shares_and_counts(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    labels = ["10", "2", "never", "rare"]
    true, guessed = rng.choice(labels, (2, 300), p=[0.6, 0.39, 0, 0.01])
    figures = []
    monkeypatch.setattr(error_analysis, "save", lambda figure, path: figures.append(figure))
    confusion = Confusion(Counter(zip(true.tolist(), guessed.tolist(), strict=True)), labels)
    error_analysis.draw_confusion(confusion, "validation: confusion", tmp_path / "a.png")
    axes, scale = figures[0].axes
    found = ["10", "2", "rare"]
    shares = confusion_matrix(true, guessed, labels=found, normalize="true")
    np.testing.assert_allclose(axes.images[0].get_array(), shares)
    counts = confusion_matrix(true, guessed, labels=found)
    assert [text.get_text() for text in axes.texts] == [str(count) for count in counts.ravel()]
    assert [text.get_text() for text in axes.get_yticklabels()] == found, "in the order of the labels"
    assert scale.get_ylabel() == "share of the true class" and axes.images[0].get_clim() == (0, 1)


def test_more_classes_than_can_be_read_are_not_drawn(tmp_path):
    names = [str(number) for number in range(101)]
    error_analysis.draw_confusion(Confusion(Counter(zip(names, names, strict=True)), names), "", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_answers_are_right_by_what_the_run_compares_them_by():
    """Marks between Chinese words are none of an answer, and an English article is a part of one."""
    for units, prediction, wrong in (
        (prediction_errors.AnswerErrors, "the cat", None),
        (prediction_errors.AnswerErrors, "《三国》", 0.5),
        (prediction_errors.CharacterAnswerErrors, "《三国》", None),
        (prediction_errors.CharacterAnswerErrors, "the cat", 0.5),
    ):
        label = "三国" if "三国" in prediction else "cat"
        assert units.error_size({"prediction": prediction, "label": [label], "probability": 0.5}) == wrong
