"""The operation `classify`: classes of a text or pair of texts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloze.launch.predict.config import PairInput
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.tables import Columns
from cloze.pipeline.bounds import bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


@dataclass(frozen=True)
class Label:
    """A label and its probability; for a regression a target and its value."""

    label: str
    score: float
    column: str | None = None
    """The label column of the label, if the model has several."""


@dataclass(frozen=True)
class Labels:
    """Labels of a text, the most probable first; for a regression in the order of its targets."""

    labels: list[Label]
    cut_tokens: int
    """Tokens of a long text that the model has not seen."""


@dataclass(frozen=True)
class Classify(Operation):
    """Labels of a text or pair with their probabilities."""

    name, head = "classify", "BertForSequenceClassification"

    top_k: int | None = field(default=None, metadata=bounds(at_least=1))
    """Number of labels for each text (for each label column); null: all."""

    def check_row(self, row: Row, learned: Columns | None) -> None:
        super().check_row(row, learned)
        if learned and len(learned.texts) == 2 and row.pair is None:
            raise UserError(
                f"{row.place}: found one text, expected two: the model was trained on pairs "
                f"({', '.join(learned.texts)}); give the second one with --pair, behind a tab in a file, "
                "or as the field pair of JSON"
            )
        if learned and len(learned.texts) == 1 and row.pair is not None:
            raise UserError(
                f"{row.place}: found two texts, expected one: the model was trained on single ones "
                f"({learned.texts[0]}); leave out --pair, what stands before or behind a tab, or the field pair"
            )

    def encode(self, encoder: TextEncoder, row: Row) -> Iterable[Encoding]:
        if encoder.pieces is None:
            return [encoder.encode(row.text, row.pair, cut=True, place=row.place)]
        if row.pair is not None:
            raise UserError(
                f"{row.place}: found a pair of texts, expected one text: the model reads long texts in pieces"
            )
        length, step = encoder.pieces
        return encoder.windows(row.text, length=length, step=step, place=row.place)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        if model.head.pieces != "none":  # the pieces of a text may be in several batches
            return list(model.vectors(**batch.inputs))
        return _probabilities(model.head, model(**batch.inputs).logits)

    def columns(self, loaded: LoadedModel | None, result: Labels) -> Fields:
        """`prediction` and the probability of each label (with `top_k` only of the first); for a regression its values;
        for independent labels a list of those above one half, in the order of the model's labels.
        """
        assert loaded is not None, "a model has said it"
        head = loaded.model.head
        columns: list[tuple[str, Any]] = []
        for column in dict.fromkeys(label.column for label in result.labels):
            labels = {label.label: label.score for label in result.labels if label.column == column}
            of = "" if column is None else f"_{column}"
            if head.answer == "numbers":
                single = len(labels) == 1
                columns += [("prediction" if single else f"prediction_{name}", value) for name, value in labels.items()]
                continue
            names = head.classes[column]
            prediction = (
                [name for name in names if labels.get(name, 0) > head.threshold]
                if head.answer == "labels"
                else next(iter(labels))
            )
            columns.append((f"prediction{of}", prediction))
            if self.top_k is None:
                columns += [(f"probability{of}_{name}", labels[name]) for name in names]
            else:
                columns.append((f"probability{of}", next(iter(labels.values()))))
        columns.append(("cut_tokens", result.cut_tokens))
        times = Counter(name for name, _ in columns)
        if twice := next((name for name in times if times[name] > 1), None):
            raise UserError(
                f"output: found two results that would both be the column {twice!r}, by the names of the model's label "
                "columns and labels, expected names that differ; write *.jsonl"
            )
        return dict(columns)

    def table_lines(self, row: Row, result: Labels) -> Iterator[dict[str, str]]:
        for label in result.labels:
            column = {"column": label.column} if label.column else {}
            yield {"text": row.both} | column | {"label": label.label, "score": figure(label.score)}

    def finish(self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]) -> Labels:
        head, result = loaded.model.head, []
        if head.pieces != "none":
            values = _classified(loaded.model, values)
        for column, scores in values[0].items():
            labels = [Label(*pair, column) for pair in zip(head.classes[column], scores, strict=True)]
            if head.answer != "numbers":
                labels.sort(key=lambda label: -label.score)
            result += labels[: self.top_k]
        return Labels(result, encodings[0].cut_tokens)


@dataclass(frozen=True)
class ClassifyConfig(Classify, PairInput):
    """Label texts or pairs of texts."""


def _probabilities(head: Any, logits: Any) -> list[dict[str | None, list[float]]]:
    """Probabilities (for a regression values) of each row of logits, by label column; None: the only column."""
    columns = head.probabilities(logits.float())
    rows = {name: values.tolist() for name, values in columns.items()}
    return [{name: values[row] for name, values in rows.items()} for row in range(len(logits))]


def _classified(model: Any, vectors: Sequence[Any]) -> list[dict[str | None, list[float]]]:
    """The same for one text, from the vectors of its pieces."""
    import torch

    stacked = torch.stack(list(vectors))
    offsets = torch.tensor([0, len(stacked)], device=stacked.device)
    return _probabilities(model.head, model.classify(model.pool_pieces(stacked, offsets)))
