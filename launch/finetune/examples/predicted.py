"""Kinds of predictions: their errors, their confusions, and the tables that show both.

A prediction is an object of a file of predictions, with `prediction`, `label` if it is known, and further entries by
kind.
"""

from __future__ import annotations

from collections import Counter

from cloze.pipeline.fields import Fields

_MOST_CLASSES = 30  # a larger confusion matrix is unreadable: its largest cells are listed instead

Scores = tuple[str, list[int], list[float]]
"""Name of a class, whether each example is of it (0, 1), and its probability."""


class Prediction:
    """A kind of prediction. By default it has no confusion tables."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        """Size of the error of a prediction with a label, larger is worse; None if it is right."""
        raise NotImplementedError

    @classmethod
    def confusions(cls, predictions: list[Fields]) -> dict[str, str]:
        """Confusion tables in Markdown by name."""
        return {}

    @classmethod
    def binary_scores(cls, predictions: list[Fields]) -> Scores | None:
        """Labels and scores of the second of two classes; None for other problems."""
        return None


class OneClass(Prediction):
    """One of several classes with the probability of each. Error: 1 - probability of the true class."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return None if each["label"] == each["prediction"] else 1 - each["probabilities"][each["label"]]

    @classmethod
    def confusions(cls, predictions: list[Fields]) -> dict[str, str]:
        return {"confusion": _confusion(Counter((each["label"], each["prediction"]) for each in predictions))}

    @classmethod
    def binary_scores(cls, predictions: list[Fields]) -> Scores | None:
        if any(len(each["probabilities"]) != 2 for each in predictions):
            return None
        second = list(predictions[0]["probabilities"])[1]
        return (
            second,
            [int(each["label"] == second) for each in predictions],
            [each["probabilities"][second] for each in predictions],
        )


class ClassOfEachColumn(Prediction):
    """A class in each of several columns. Error: the largest of the columns."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        if each["label"] == each["prediction"]:
            return None
        return max(1 - each["probabilities"][column][label] for column, label in each["label"].items())

    @classmethod
    def confusions(cls, predictions: list[Fields]) -> dict[str, str]:
        return {
            f"confusion {column}": _confusion(
                Counter((each["label"][column], each["prediction"][column]) for each in predictions)
            )
            for column in predictions[0]["label"]
        }


class Labels(Prediction):
    """Independent labels. Error: the largest error of a probability."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        if each["label"] == each["prediction"]:
            return None
        return max(abs(chance - (name in each["label"])) for name, chance in each["probabilities"].items())

    @classmethod
    def confusions(cls, predictions: list[Fields]) -> dict[str, str]:
        """One row with four cells per label; with very many labels those with the most errors."""
        sides = [(set(each["label"]), set(each["prediction"])) for each in predictions]
        rows = []
        for name in predictions[0]["probabilities"]:
            cells = Counter((name in true, name in guessed) for true, guessed in sides)
            counts = [cells[cell] for cell in ((True, True), (True, False), (False, True), (False, False))]
            rows.append((name, counts))
        if len(rows) > _MOST_CLASSES:
            rows = sorted(rows, key=lambda row: -row[1][1] - row[1][2])[:_MOST_CLASSES]
        header = ["label", "true and predicted", "true, not predicted", "predicted, not true", "neither"]
        return {"confusion": markdown(header, [[name, *map(str, counts)] for name, counts in rows])}


class Number(Prediction):
    """A number. Error: its distance to the true one."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return abs(each["label"] - each["prediction"]) or None


class NumberOfEachColumn(Prediction):
    """Several numbers. Error: the largest of them."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return max(abs(value - each["prediction"][column]) for column, value in each["label"].items()) or None


class Tags(Prediction):
    """A tag per word with its probability. Error: the highest probability of a wrong tag."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return max(
            (
                chance
                for chance, true, guessed in zip(each["probabilities"], each["label"], each["prediction"], strict=True)
                if true != guessed
            ),
            default=None,
        )

    @classmethod
    def confusions(cls, predictions: list[Fields]) -> dict[str, str]:
        return {
            "confusion": _confusion(
                Counter(pair for each in predictions for pair in zip(each["label"], each["prediction"], strict=True))
            )
        }


class Answer(Prediction):
    """An answer (empty for none), of which several may be right. Error: the probability of a wrong answer."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return None if each["prediction"] in (each["label"] or [""]) else each["probability"]


class Ranks(Prediction):
    """Ranks by vectors. Error: the distance of a rank to the right one."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return each["rank_error"] or None


def _confusion(counts: Counter[tuple[str, str]]) -> str:
    """Confusion matrix, true classes in rows and predicted ones in columns; with very many classes the most confused
    pairs.
    """
    names = sorted({name for pair in counts for name in pair})
    if len(names) > _MOST_CLASSES:
        wrong = [(pair, count) for pair, count in counts.most_common() if pair[0] != pair[1]][:_MOST_CLASSES]
        return markdown(["true", "predicted", "examples"], [[*pair, str(count)] for pair, count in wrong])
    return markdown(
        ["true \\ predicted", *names], [[true, *(str(counts[true, guessed]) for guessed in names)] for true in names]
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)
