"""What a classifier says of a text or pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.config.checks import at_least
from launch.predicting.operation import Batch, Operation, Row
from pipeline.encoding import Encoder, Encoding

if TYPE_CHECKING:
    from launch.predict import Predictor


@dataclass(frozen=True)
class Label:
    """A label and its probability; of a regression: a target and its value."""

    label: str
    score: float
    column: str | None = None
    """Of several label columns, the one that the label is of."""


@dataclass(frozen=True)
class Labels:
    """Labels of a text, the most probable first; of a regression in the order of its targets."""

    labels: list[Label]
    cut_tokens: int
    """Tokens at the end of a long text that the model has not seen."""


@dataclass(frozen=True)
class Classify(Operation):
    """Labels of a text or pair with their probabilities."""

    name, head = "classify", "BertForSequenceClassification"

    top_k: int | None = None
    """Labels given for each text (for each label column), at least 1; null: all."""

    def __post_init__(self) -> None:
        at_least("predict", self, top_k=1)
        super().__post_init__()

    def encode(self, encoder: Encoder, row: Row) -> list[Encoding]:
        return [encoder.encode(row.text, row.pair, cut=True, place=row.place)]

    def read(self, model: Any, batch: Batch) -> list[Any]:
        logits = model(**batch.inputs).logits.float()
        if model.head.problem == "columns":
            parts = model.split_columns(logits)
            columns = {name: part.softmax(-1).tolist() for name, part in parts.items()}
            return [{name: rows[row] for name, rows in columns.items()} for row in range(len(logits))]
        activations = {"single_label": lambda x: x.softmax(-1), "multi_label": lambda x: x.sigmoid(),
                       "regression": lambda x: x}
        return [{None: row} for row in activations[model.head.problem](logits).tolist()]

    def finish(self, predictor: "Predictor", row: Row, encodings: Sequence[Encoding], values: Sequence[Any]) -> Labels:
        head, result = predictor.model.head, []
        classes = dict(head.columns) or {None: head.labels}
        for column, scores in values[0].items():
            labels = [Label(*pair, column) for pair in zip(classes[column], scores, strict=True)]
            if head.problem != "regression":
                labels.sort(key=lambda label: -label.score)
            result += labels[: self.top_k]
        return Labels(result, encodings[0].cut_tokens)
