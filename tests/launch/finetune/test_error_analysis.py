"""Confused classes, and the examples that a model was surest and wrong about."""

import numpy as np
import pytest
from sklearn.metrics import multilabel_confusion_matrix

from cloze.launch.finetune.error_analysis import tables
from cloze.launch.finetune.examples import predicted


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
    "columns": predicted.ClassOfEachColumn,
    "labels": predicted.Labels,
    "numbers": predicted.Number,
    "tags": predicted.Tags,
    "answers": predicted.Answer,
}


class Texts:
    """Of examples, what the tables need."""

    def __init__(self, kind) -> None:
        self.kind = kind

    def text(self, number: int) -> str:
        return f"the | text\n{number}"


def cells(table: str) -> list[list[str]]:
    """Rows of a table in Markdown, its header first, the line below it left out."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.strip().split("\n")]
    return rows[:1] + rows[2:]


@pytest.mark.parametrize(
    "kind, confusions",
    [
        (
            "columns",
            {
                "confusion size": [["true \\ predicted", "l", "s"], ["l", "0", "0"], ["s", "2", "1"]],
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
    _, *rows = cells(tables(Texts(predicted.Labels), predictions)["confusion"])
    expected = {
        name: [matrix[1, 1], matrix[1, 0], matrix[0, 1], matrix[0, 0]]
        for name, matrix in zip(names, multilabel_confusion_matrix(true, guessed), strict=True)
    }
    errors = sorted((each[1] + each[2] for each in expected.values()), reverse=True)
    assert all(expected[name] == [int(cell) for cell in counts] for name, *counts in rows)
    assert [int(row[2]) + int(row[3]) for row in rows] == errors[:30]


def test_of_very_many_classes_the_pairs_that_are_confused_most():
    pairs = [(str(n), str(n // 2)) for n in range(40)] + [("7", "9")] * 3
    predictions = [
        {"place": "p", "label": true, "prediction": guessed, "probabilities": {true: 0.5}} for true, guessed in pairs
    ]
    assert cells(tables(Texts(predicted.OneClass), predictions)["confusion"])[1] == ["7", "9", "3"]
