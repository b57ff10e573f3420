"""Kinds of predictions: their errors, their confusions, and the tables that show both.

A prediction is an object of a file of predictions, with `prediction`, `label` where that is known, and what its kind
has beside.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_MOST_CLASSES = 30  # a larger matrix is no table that anybody reads: its fullest cells are listed instead

Scores = tuple[str, list[int], list[float]]
"""Name of a class, whether each example is of it (0, 1), and its probability."""


class Prediction:
    """A kind of predictions; nothing is taken for anything else where that says nothing."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        """How wrong a prediction with a label is, the more the worse; None if it is right."""
        raise NotImplementedError

    @classmethod
    def confusions(cls, predictions: list[dict[str, Any]]) -> dict[str, str]:
        """Tables in Markdown, by name, of what is taken for what."""
        return {}

    @classmethod
    def binary_scores(cls, predictions: list[dict[str, Any]]) -> Scores | None:
        """Of two classes the second one; None for anything else."""
        return None


class OneClass(Prediction):
    """A class of several, with the probability of each: as wrong as the true one's is small."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        return None if each["label"] == each["prediction"] else 1 - each["probabilities"][each["label"]]

    @classmethod
    def confusions(cls, predictions: list[dict[str, Any]]) -> dict[str, str]:
        return {"confusion": _confusion(Counter((each["label"], each["prediction"]) for each in predictions))}

    @classmethod
    def binary_scores(cls, predictions: list[dict[str, Any]]) -> Scores | None:
        if any(len(each["probabilities"]) != 2 for each in predictions):
            return None
        second = list(predictions[0]["probabilities"])[1]
        return (second, [int(each["label"] == second) for each in predictions],
                [each["probabilities"][second] for each in predictions])


class ClassOfEachColumn(Prediction):
    """A class in each of several columns: as wrong as the worst of them."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        if each["label"] == each["prediction"]:
            return None
        return max(1 - each["probabilities"][column][label] for column, label in each["label"].items())

    @classmethod
    def confusions(cls, predictions: list[dict[str, Any]]) -> dict[str, str]:
        return {f"confusion {column}": _confusion(Counter((each["label"][column], each["prediction"][column])
                                                          for each in predictions))
                for column in predictions[0]["label"]}


class Labels(Prediction):
    """Independent labels: as wrong as the most wrong of their probabilities."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        if each["label"] == each["prediction"]:
            return None
        return max(abs(chance - (name in each["label"])) for name, chance in each["probabilities"].items())

    @classmethod
    def confusions(cls, predictions: list[dict[str, Any]]) -> dict[str, str]:
        """Each label's four cells in a row; of very many labels those with the most errors."""
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
    """A number: as wrong as it is far from the true one."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        return abs(each["label"] - each["prediction"]) or None


class NumberOfEachColumn(Prediction):
    """Several numbers: as wrong as the worst of them."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        return max(abs(value - each["prediction"][column]) for column, value in each["label"].items()) or None


class Tags(Prediction):
    """A tag a word, each with its probability: as wrong as the model was sure of a wrong one."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        return max((chance for chance, true, guessed in zip(each["probabilities"], each["label"], each["prediction"],
                                                            strict=True) if true != guessed), default=None)

    @classmethod
    def confusions(cls, predictions: list[dict[str, Any]]) -> dict[str, str]:
        return {"confusion": _confusion(Counter(
            pair for each in predictions for pair in zip(each["label"], each["prediction"], strict=True)))}


class Answer(Prediction):
    """An answer, or none (empty), of which several may be right: as wrong as the model was sure of a wrong one."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        return None if each["prediction"] in (each["label"] or [""]) else each["probability"]


class Ranks(Prediction):
    """What vectors find or measure: as wrong as a rank is far from the right one."""

    @classmethod
    def error_size(cls, each: dict[str, Any]) -> float | None:
        return each["rank_error"] or None


def _confusion(counts: Counter) -> str:
    """A row a true class, a column a predicted one; of very many classes the pairs that are confused most."""
    names = sorted({name for pair in counts for name in pair})
    if len(names) > _MOST_CLASSES:
        wrong = [(pair, count) for pair, count in counts.most_common() if pair[0] != pair[1]][:_MOST_CLASSES]
        return markdown(["true", "predicted", "examples"], [[*pair, str(count)] for pair, count in wrong])
    return markdown(["true \\ predicted", *names],
                    [[true, *(str(counts[true, guessed]) for guessed in names)] for true in names])


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)
