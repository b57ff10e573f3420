"""Errors of predictions by kind: their confusions, and the tables that show both.

A prediction is an object of a file of predictions, with `prediction`, `label` if it is known, and further entries by
kind.
"""

from collections import Counter

from cloze.launch.finetune.squad import exact_match, normalized_characters, normalized_words
from cloze.launch.system.console import markdown
from cloze.pipeline.fields import Fields

MOST_CLASSES = 30  # a larger confusion matrix is unreadable: its largest cells are listed instead

Scores = tuple[str, list[int], list[float]]
"""Name of a class, whether each example is of it (0, 1), and its probability."""


class Confusion:
    """How often each class was predicted for each true class.

    Args:
        counts: by true and predicted class.
        labels: all classes in their order; the matrix has those that occur.
    """

    def __init__(self, counts: Counter[tuple[str, str]], labels: list[str]) -> None:
        names = {name for pair in counts for name in pair}
        self.counts, self.labels = counts, [label for label in labels if label in names]

    def table(self) -> str:
        """A table in Markdown, true classes in rows and predicted ones in columns; with very many classes the most
        confused pairs.
        """
        if len(self.labels) > MOST_CLASSES:
            wrong = [(pair, count) for pair, count in self.counts.most_common() if pair[0] != pair[1]][:MOST_CLASSES]
            return markdown(["true", "predicted", "examples"], [[*pair, str(count)] for pair, count in wrong])
        rows = [[true, *(str(self.counts[true, guessed]) for guessed in self.labels)] for true in self.labels]
        return markdown(["true \\ predicted", *self.labels], rows)


class PredictionErrors:
    """How predictions of a kind are wrong. By default they have no confusion tables."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        """Size of the error of a prediction with a label, larger is worse; None if it is right."""
        raise NotImplementedError

    @classmethod
    def matrices(cls, predictions: list[Fields]) -> dict[str, Confusion]:
        """Confusion matrices by name."""
        return {}

    @classmethod
    def confusions(cls, predictions: list[Fields]) -> dict[str, str]:
        """Confusion tables in Markdown by name."""
        return {name: matrix.table() for name, matrix in cls.matrices(predictions).items()}

    @classmethod
    def binary_scores(cls, predictions: list[Fields]) -> Scores | None:
        """Labels and scores of the second of two classes; None for other problems."""
        return None


class ClassErrors(PredictionErrors):
    """One of several classes with the probability of each. Error: 1 - probability of the true class."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return None if each["label"] == each["prediction"] else 1 - each["probabilities"][each["label"]]

    @classmethod
    def matrices(cls, predictions: list[Fields]) -> dict[str, Confusion]:
        counts = Counter((each["label"], each["prediction"]) for each in predictions)
        return {"confusion": Confusion(counts, list(predictions[0]["probabilities"]))}

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


class ColumnErrors(PredictionErrors):
    """A class in each of several columns. Error: the largest of the columns."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        if each["label"] == each["prediction"]:
            return None
        return max(1 - each["probabilities"][column][label] for column, label in each["label"].items())

    @classmethod
    def matrices(cls, predictions: list[Fields]) -> dict[str, Confusion]:
        return {
            f"confusion {column}": Confusion(
                Counter((each["label"][column], each["prediction"][column]) for each in predictions), list(labels)
            )
            for column, labels in predictions[0]["probabilities"].items()
        }


class LabelErrors(PredictionErrors):
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
        if len(rows) > MOST_CLASSES:
            rows = sorted(rows, key=lambda row: -row[1][1] - row[1][2])[:MOST_CLASSES]
        header = ["label", "true and predicted", "true, not predicted", "predicted, not true", "neither"]
        return {"confusion": markdown(header, [[name, *map(str, counts)] for name, counts in rows])}


class NumberErrors(PredictionErrors):
    """A number. Error: its distance to the true one."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return abs(each["label"] - each["prediction"]) or None


class NumberOfEachColumn(PredictionErrors):
    """Several numbers. Error: the largest of them."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return max(abs(value - each["prediction"][column]) for column, value in each["label"].items()) or None


class TagErrors(PredictionErrors):
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
    def matrices(cls, predictions: list[Fields]) -> dict[str, Confusion]:
        counts = Counter(pair for each in predictions for pair in zip(each["label"], each["prediction"], strict=True))
        return {"confusion": Confusion(counts, sorted({name for pair in counts for name in pair}))}


class AnswerErrors(PredictionErrors):
    """An answer (empty for none), of which several may be right. Error: the probability of a wrong answer."""

    units = staticmethod(normalized_words)
    """What answers are compared by."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        right = any(exact_match(each["prediction"], text, cls.units) for text in each["label"] or [""])
        return None if right else each["probability"]


class CharacterAnswerErrors(AnswerErrors):
    """The same for languages that are written without spaces."""

    units = staticmethod(normalized_characters)


class RankErrors(PredictionErrors):
    """Ranks by vectors. Error: the distance of a rank to the right one."""

    @classmethod
    def error_size(cls, each: Fields) -> float | None:
        return each["rank_error"] or None
