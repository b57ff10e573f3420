"""Classification, regression and multi-label classification of texts and pairs of texts."""

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune import scoring
from cloze.launch.finetune.examples.base import Examples, remarks
from cloze.launch.finetune.examples.prediction_errors import (
    ClassErrors,
    ColumnErrors,
    LabelErrors,
    NumberErrors,
    NumberOfEachColumn,
    PredictionErrors,
)
from cloze.launch.finetune.kind import TABLE_FIELDS, Kind, Read
from cloze.launch.texts.labels import looking_alike
from cloze.launch.texts.sequences import build_pieces, build_sequences
from cloze.launch.texts.settings import Truncation
from cloze.launch.texts.tables import Columns, Table, TableRow, json_value, parse_json, read_table
from cloze.model.config import Pooling, VectorPooling
from cloze.model.problems import HeadConfig
from cloze.model.tasks import BertForSequenceClassification
from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_MISSING = (None, "")
# For unknown labels, where none has this name: test files of GLUE and SWAG that have a label column hold it.
_UNKNOWN = (-1, "-1")
_MOST = float(np.finfo(np.float32).max) ** 0.5  # of a number that is learned: its square is a loss in fp32


def _sorted(labels: Iterable[str], path: Path) -> tuple[str, ...]:
    """Distinct labels of a table, sorted by name; whole numbers sorted by value.

    Raises:
        UserError: two look alike.
    """
    found = set(labels)
    if alike := looking_alike(found):
        raise UserError(
            f"{path}: found the labels {alike}, which look alike, expected one way to write each; correct the table, "
            "or name both with --labels"
        )
    try:
        return tuple(sorted(found, key=lambda label: (int(label), label)))  # 1 and 01 are different labels
    except ValueError:
        return tuple(sorted(found))


# Of a cell, in which a printed list is looked for: in the worst case that takes the square of its length.
_MOST_OF_A_LIST = 5000
# What Python, NumPy, Postgres and others print. A label may have brackets and quotes without that.
_PRINTED_LIST = re.compile(
    r"""[\[({]\s*[bru]?\\*(['"]).*?\1\s*([,:\])}]|$)  # a quoted text in brackets
    | ['"]\\*\s*[\]}]                                # the end of one, whose beginning was cut off
    | [\[({][^\])}]*,[^\[({]*[\])}]                  # a comma within brackets
    | ^\s*\{.*\}\s*$                                 # braces around all of it
    | ^\s*".*,.*"\s*$                                # a comma within quotes""",
    re.VERBOSE | re.DOTALL,
)


def _label_set(row: TableRow, column: str) -> list[str]:
    """Independent labels of a row: a list, also as JSON in a cell (as `predict` writes it), or words with commas
    between them, of which the first begins with no bracket, and none looks like a part of a list.
    """
    if row.values.get(column) is None:
        raise UserError(
            f"{row.place}: found nothing in column {column!r}, expected a list of labels, which may be "
            "empty; fix the row"
        )
    value = row.values[column]
    if isinstance(value, str) and (value.lstrip().startswith("[") or _PRINTED_LIST.search(value[:_MOST_OF_A_LIST])):
        text, why = value, "no list"
        try:
            value = parse_json(text)
        except ValueError as error:  # such as a list or a set as Python prints it, or one that was cut
            why = str(error)
        if not isinstance(value, list):
            raise UserError(
                f"{row.place}: found {text!r:.60} in column {column!r}, expected a list in JSON after a bracket ({why})"
                '; write it as ["a", "b"], or as a,b'
            )
    if isinstance(value, list) and any(isinstance(part, str) and not part.strip() for part in value):
        raise UserError(f"{row.place}: found an empty label in column {column!r}, expected names; fix the row")
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        raise UserError(
            f"{row.place}: found {value!r:.60} in column {column!r}, expected a list of labels, or labels with "
            "commas between them; fix the row"
        )
    if not all(map(_is_name, value)):
        raise UserError(f"{row.place}: found {value!r:.60} in column {column!r}, expected texts in it; fix the row")
    return [str(part) for part in value]


FIX_LABEL = "fix the row, or name this label too in a list of all with --labels"


class TextExamples(Examples):
    """A text or a pair of texts each, with its targets: one subclass for each problem type of a head.

    Args:
        texts, targets: names of columns.
        truncation: None with a head that reads pieces.
    """

    averaged: Mapping[str, str]
    """What metrics are averaged over, where their names do not say."""
    several_columns = True
    """Whether there may be several columns of targets."""

    numbers_from: float = math.inf
    """How many columns of targets there must be at least for them to hold numbers, and not labels."""

    def __init__(
        self,
        table: Table,
        task: Task,
        texts: tuple[str, ...],
        targets: tuple[str, ...],
        head: HeadConfig,
        tokenizer: Tokenizer,
        truncation: Truncation | None,
    ) -> None:
        table.need(texts, "text_columns")
        self._rows, self._head, self._task = table.rows, head, task
        self._texts, self._columns = texts, targets
        sides = [[row.text(column) for row in table.rows] for column in texts]
        if head.pieces == "none":
            assert truncation is not None, "only pieces are not cut"
            pairs = sides[1] if len(sides) > 1 else None
            self._sequences, cut = build_sequences(tokenizer, sides[0], pairs, truncation)
            self._of_row, said = np.arange(len(table.rows) + 1), str(cut)
        else:
            self._sequences, self._of_row = build_pieces(tokenizer, sides[0], head.piece_length, head.piece_step)
            said = f"{len(self._sequences):,} pieces, none cut"
        self.lengths = np.diff(self._sequences.offsets[self._of_row])
        self.width = head.num_outputs
        self.labelled = has_labels(table, targets, [*chain.from_iterable(head.classes.values())])
        self._true = np.array([self._target(row) for row in self._rows]) if self.labelled else np.empty(0)
        self.measured = scoring.explained(task.metrics, dict(self.averaged))
        rows = f"{len(self):,} rows{remarks(list(zip(*sides, strict=True)), tokenizer)}"
        self.facts = f"{rows}, {self.lengths.sum():,} tokens, at most {self.lengths.max()}, {said}{table.left_out}"

    @staticmethod
    @abstractmethod
    def find_head(
        task: Task, targets: tuple[str, ...], table: Table, listed: list[str], pooling: Pooling
    ) -> HeadConfig:
        """The head with its labels: those listed, else those of the task, else those in the training file.

        Raises:
            UserError: the labels do not fit the task or the file.
        """

    @abstractmethod
    def _target(self, row: TableRow) -> object:
        """The target of a row as a number or numbers.

        Raises:
            UserError: the row holds no such target.
        """

    @abstractmethod
    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        """The predictions in the form of targets, (N,) or (N, ...), from outputs (N, width)."""

    @abstractmethod
    def _named(self, numbers: np.ndarray) -> object:
        """A target or prediction of a row with names of labels."""

    def _probabilities(self, scores: np.ndarray) -> Fields:
        """The entry `probabilities` of a prediction from the scores (width,) of a row; empty for regression."""
        if self._head.answer == "numbers":
            return {}
        columns = self._head.probabilities(torch.from_numpy(scores[None]).double())
        named = {
            name: dict(zip(self._head.classes[name], values[0].tolist(), strict=True))
            for name, values in columns.items()
        }
        return {"probabilities": named if self._head.columns else named[None]}

    def batch(self, units: np.ndarray) -> MicroBatch:
        batch = super().batch(units)
        if self._head.pieces == "none":
            return batch
        return batch | {"piece_offsets": torch.from_numpy(ragged.to_offsets(np.diff(self._of_row)[units]))}

    def sequences(self, units: np.ndarray) -> np.ndarray:
        return ragged.ranges(self._of_row[:-1][units], np.diff(self._of_row)[units])

    def targets(self, units: np.ndarray) -> Fields:
        return {"labels": torch.from_numpy(self._true[units])}

    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        labels = self.targets(np.arange(len(outputs)))["labels"]
        losses, count = self._head.losses(torch.from_numpy(outputs), labels)
        return {"loss": (losses.sum(0) / count).sum().item()} | self._measured(self._predicted(outputs))

    def _measured(self, guesses: np.ndarray) -> dict[str, float]:
        return scoring.measure(self._task.metrics, self._true, guesses)

    def text(self, number: int) -> str:
        return " / ".join(self._rows[number].text(column) for column in self._texts)

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        described = []
        for number, row in enumerate(self._rows):
            guess = self._named(self._predicted(outputs[number][None])[0])
            entry = predicted(row, {"prediction": guess} | self._probabilities(outputs[number]))
            if self.labelled:
                entry["label"] = self._named(self._true[number])
            described.append(entry)
        return described


class ClassExamples(TextExamples):
    """One class of several."""

    several_columns = False

    errors = ClassErrors

    @property
    def averaged(self) -> Mapping[str, str]:  # type: ignore[override]  # depends on the labels
        return {"f1": f"of class {self._head.labels[-1]}", "f1_macro": "mean over classes"}

    @staticmethod
    def find_head(
        task: Task, targets: tuple[str, ...], table: Table, listed: list[str], pooling: Pooling
    ) -> HeadConfig:
        labels = tuple(listed) or task.labels or _sorted((label_of(row, targets[0]) for row in table.rows), table.path)
        if len(labels) < 2:
            if listed:
                raise UserError(f"labels: found {labels[0]} alone, expected at least two; name all classes")
            raise UserError(
                f"{table.path}: found {len(labels)} label in column {targets[0]!r}, expected at least two; "
                "list them with --labels, or take a task of numbers"
            )
        if len(labels) > 2 and "f1" in task.metrics:
            raise UserError(
                f"labels: found {len(labels)}, expected the two classes of {targets[0]}: the task's f1 is that of the "
                "second one; take the task classification or pair-classification"
            )
        return HeadConfig(labels, "single_label", pooling=pooling)

    def _target(self, row: TableRow) -> int:
        return number_of(row, label_of(row, self._columns[0]), self._head.labels)

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(1)

    def majority(self) -> dict[str, float]:
        guesses = np.full_like(self._true, np.bincount(self._true).argmax())
        return scoring.measure(self._task.metrics, self._true, guesses)

    def _named(self, numbers: np.ndarray) -> str:
        return self._head.labels[int(numbers)]


class ColumnExamples(TextExamples):
    """A class in each of several columns of labels, each with a softmax of its own."""

    errors = ColumnErrors
    averaged: Mapping[str, str] = {"accuracy_mean": "mean over columns"}

    @staticmethod
    def find_head(
        task: Task, targets: tuple[str, ...], table: Table, listed: list[str], pooling: Pooling
    ) -> HeadConfig:
        if "mean" in targets:
            raise UserError(
                "label_columns: found the column 'mean', whose accuracy would be called accuracy_mean, as that of all "
                "columns; rename it"
            )
        columns = tuple((name, _sorted((label_of(row, name) for row in table.rows), table.path)) for name in targets)
        names = tuple(f"{name}: {label}" for name, labels in columns for label in labels)
        return HeadConfig(names, "columns", columns, pooling)

    def _target(self, row: TableRow) -> list[int]:
        return [number_of(row, label_of(row, name), labels, "fix the row") for name, labels in self._head.columns]

    def _split(self, outputs: np.ndarray) -> list[np.ndarray]:
        return np.split(outputs, np.cumsum([len(labels) for _, labels in self._head.columns])[:-1], axis=1)

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        return np.stack([part.argmax(1) for part in self._split(outputs)], 1)

    def _measured(self, guesses: np.ndarray) -> dict[str, float]:
        accuracies = {
            f"accuracy_{name}": float(np.mean(self._true[:, number] == guesses[:, number]))
            for number, (name, _) in enumerate(self._head.columns)
        }
        return {"accuracy_mean": float(np.mean(list(accuracies.values())))} | accuracies

    def _named(self, numbers: np.ndarray) -> dict[str, str]:
        return {name: labels[int(number)] for (name, labels), number in zip(self._head.columns, numbers, strict=True)}


class _OfNumbers(TextExamples):
    """Examples whose target is a vector of numbers, of which the loss is a mean: one loss per example."""

    def targets(self, units: np.ndarray) -> Fields:
        return {"labels": torch.from_numpy(self._true[units].astype(np.float32))}

    def num_targets(self, micro_batch: MicroBatch) -> torch.Tensor:
        return torch.tensor([len(micro_batch["labels"])])


class LabelExamples(_OfNumbers):
    """Independent labels: a column with a list of them, or a column of 0 and 1 for each."""

    errors, numbers_from = LabelErrors, 2  # a column of 0 and 1 for each label
    averaged: Mapping[str, str] = {
        "f1_micro": "over all labels together",
        "f1_macro": "mean over labels",
        "exact_match": "all labels of an example",
    }

    @staticmethod
    def find_head(
        task: Task, targets: tuple[str, ...], table: Table, listed: list[str], pooling: Pooling
    ) -> HeadConfig:
        if len(targets) > 1:
            if listed:
                raise UserError(
                    f"labels: found {', '.join(listed)} with the label columns {', '.join(targets)}, "
                    "expected none: each column is a label; leave --labels out"
                )
            return HeadConfig(targets, "multi_label", pooling=pooling)
        given = (label for row in table.rows for label in _label_set(row, targets[0]))
        labels = tuple(listed) or _sorted(given, table.path)
        if not labels:
            raise UserError(
                f"{table.path}: found no label in column {targets[0]!r} of any row, expected some; name them with "
                "--labels"
            )
        return HeadConfig(labels, "multi_label", pooling=pooling)

    def _target(self, row: TableRow) -> list[int]:
        if len(self._columns) > 1:
            return [_yes_or_no(row, column) for column in self._columns]
        given = {number_of(row, label, self._head.labels) for label in _label_set(row, self._columns[0])}
        return [int(number in given) for number in range(len(self._head.labels))]

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        probabilities = self._head.probabilities(torch.from_numpy(outputs))[None]
        return (probabilities > self._head.threshold).numpy().astype(np.int64)

    def _named(self, numbers: np.ndarray) -> list[str]:
        return [label for label, number in zip(self._head.labels, numbers, strict=True) if number]


class NumberExamples(_OfNumbers):
    """A number, or one for each of several columns."""

    numbers_from = 1

    @property
    def errors(self) -> type[PredictionErrors]:  # type: ignore[override]  # depends on the columns
        return NumberOfEachColumn if len(self._columns) > 1 else NumberErrors

    @property
    def averaged(self) -> Mapping[str, str]:  # type: ignore[override]
        return dict.fromkeys(self._task.metrics, "mean over columns") if len(self._columns) > 1 else {}

    @staticmethod
    def find_head(
        task: Task, targets: tuple[str, ...], table: Table, listed: list[str], pooling: Pooling
    ) -> HeadConfig:
        return HeadConfig(targets, "regression", pooling=pooling)

    def _target(self, row: TableRow) -> list[float]:
        return [number_in(row, column) for column in self._columns]

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        return outputs

    def _measured(self, guesses: np.ndarray) -> dict[str, float]:
        names = self._task.metrics
        parts = [scoring.measure(names, self._true[:, n], guesses[:, n]) for n in range(len(self._columns))]
        if len(parts) == 1:
            return parts[0]
        means = {name: float(np.mean([part[name] for part in parts])) for name in names}
        return means | {
            f"{name}_{column}": value
            for column, part in zip(self._columns, parts, strict=True)
            for name, value in part.items()
        }

    def _named(self, numbers: np.ndarray) -> float | dict[str, float]:
        values = dict(zip(self._columns, map(float, numbers), strict=True))
        return values if len(values) > 1 else values[self._columns[0]]


def predicted(row: TableRow, prediction: Fields) -> Fields:
    """An object of a file of predictions: the place of the row, its columns, the prediction. A column is left out if an
    entry of ours has its name.
    """
    ours = ("place", "label", *prediction)
    columns = {name: json_value(value) for name, value in row.values.items() if name not in ours}
    return {"place": row.place.rsplit(": ", 1)[1]} | columns | prediction


def has_labels(table: Table, columns: tuple[str, ...], labels: Collection[str]) -> bool:
    """Whether the columns of targets hold any label, of the labels of the head (empty: they are numbers)."""
    none = _MISSING if "-1" in labels else (*_MISSING, *_UNKNOWN)
    return set(columns) <= set(table.columns) and any(
        row.values.get(column) not in none for row in table.rows for column in columns
    )


def label_of(row: TableRow, column: str) -> str:
    """The label in a column.

    Raises:
        UserError: with the row, if there is none.
    """
    value = row.values.get(column)
    blank = isinstance(value, str) and not value.strip()
    if value is None or blank or value != value:  # pandas writes NaN for a label that is missing
        raise UserError(f"{row.place}: found no label in column {column!r}, expected one; fix the row")
    if not _is_name(value):
        raise UserError(f"{row.place}: found {value!r:.60} in column {column!r}, expected a label; fix the row")
    return str(value)


def _is_name(value: object) -> bool:
    """Whether a value can be a label: a text, a number, a date, but no list, object, bytes, null or NaN."""
    return value is not None and not isinstance(value, list | dict | bytes) and value == value


def number_in(row: TableRow, column: str) -> float:
    """The number in a column.

    Raises:
        UserError: with the row, if there is none.
    """
    value = row.values.get(column)
    try:
        # Python also reads 1_000, digits of other scripts, and true as 1.
        plain = not isinstance(value, bool | bytes) and str(value).isascii() and "_" not in str(value)
        number = float(value) if plain else float("nan")  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= _MOST:
        raise UserError(f"{row.place}: found {value!r:.60} in column {column!r}, expected a number; fix the row")
    return number


def _yes_or_no(row: TableRow, column: str) -> int:
    """1 or 0 from a cell with a number (int or float) or a boolean.

    Raises:
        UserError: the cell holds something else.
    """
    value = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}.get(label_of(row, column).lower())
    if value is None:
        raise UserError(
            f"{row.place}: found {row.values[column]!r:.60} in column {column!r}, expected 0 or 1; fix the row"
        )
    return value


def number_of(row: TableRow, label: str, labels: tuple[str, ...], fix: str = FIX_LABEL) -> int:
    """The number of a row's label.

    Raises:
        UserError: there is no such label.
    """
    if label not in labels:
        raise unknown_label(row.place, label, labels, fix)
    return labels.index(label)


def unknown_label(place: str, label: str, labels: tuple[str, ...], fix: str = FIX_LABEL) -> UserError:
    """The refusal of a label, whether the known ones were given or found in the training set."""
    shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
    return UserError(f"{place}: found the label {label!r}, expected one of {len(labels)}: {shown}; {fix}")


class TextClassification(Kind):
    """A class, a number, labels or a class of each column for a text or a pair of texts.

    Args:
        examples: those of the problem type of its head.
        fields: further fields that it reads.
    """

    question = 'predict classify {run} "TEXT"'

    def __init__(self, examples: type[TextExamples], *fields: str) -> None:
        self.examples = examples
        self.fields = ("pooling", "keep", "read_layers", *TABLE_FIELDS, *fields)  # type: ignore[misc]

    def check(self, config: FinetuneConfig, task: Task) -> None:
        if config.read_layers != "last" and config.pooling in (None, "pooler"):
            raise UserError(
                f"pooling: found pooler with read_layers {config.read_layers}, expected cls, mean or max: the "
                "pooler was made for the last layer; add --pooling cls"
            )
        texts = config.texts_of(task)
        if config.keep == "pieces" and len(texts) > 1:
            raise UserError(
                f"keep: found pieces with a pair of texts ({', '.join(texts)}), expected one text; take head, "
                "tail or head_tail"
            )

    def pooling(self, learned: VectorPooling | None, has_pooler: bool) -> Pooling:
        # Without a pooler nothing has taught the model to tell a text's meaning at [CLS] (docs/experiments.md).
        return "pooler" if has_pooler else "mean"

    def columns(self, config: FinetuneConfig, task: Task) -> Columns:
        return Columns(config.texts_of(task), header=task.header)

    def joins(self, config: FinetuneConfig, task: Task) -> bool:
        return len(config.texts_of(task)) > 1

    def next_command(self, config: FinetuneConfig, task: Task) -> str:
        return self.question + (' --pair "SECOND TEXT"' if self.joins(config, task) else "")

    def read(self, config: FinetuneConfig, task: Task, tokenizer: Tokenizer, hidden_size: int) -> Read:
        texts = config.texts_of(task)
        targets = config.targets_of(task)
        if not targets:
            raise UserError(f"label_columns: found none, expected the label columns of {config.task}; name them")
        if len(texts) > 2:
            raise UserError(f"text_columns: found {len(texts)} columns, expected one, or two for pairs")
        length, step = config.lengths
        if config.keep == "pieces" and step > length - 2:
            raise UserError(
                f"window_step: found {step}, expected at most {length - 2}, the "
                "tokens of a piece beside [CLS] and [SEP], so that every token is in a piece"
            )
        if len(targets) > 1 and not self.examples.several_columns:
            raise UserError(
                f"label_columns: found {len(targets)} columns, expected one; label-columns is the task of several"
            )

        are_numbers = len(targets) >= self.examples.numbers_from
        labels = None if are_numbers else tuple(config.labels) or task.labels

        def table(path: str) -> Table:
            return read_table(path, task.header, texts[0], config.skip_malformed_rows, labels)

        def examples(read: Table) -> TextExamples:
            measured, columns = task, (texts, targets)
            if task.diagnostic and set(task.diagnostic) <= set(read.columns):
                measured = replace(task, metrics=(*task.metrics, "matthews_correlation"))
                columns = task.diagnostic[:2], task.diagnostic[2:]
            return self.examples(read, measured, *columns, head, tokenizer, self.truncation(config))

        train = table(config.train_file)
        train.need(targets, "label_columns")
        head = self.examples.find_head(task, targets, train, config.labels, config.pooling or "pooler")
        head = replace(head, layers=config.read_layers)
        if config.keep == "pieces":
            head = replace(head, pieces=config.piece_pooling, piece_length=length, piece_step=step)
        return BertForSequenceClassification, head, examples(train), lambda path: examples(table(path))


CLASSIFICATION = TextClassification(ClassExamples, "labels")
REGRESSION = TextClassification(NumberExamples)
MULTI_LABEL = TextClassification(LabelExamples, "labels")
LABEL_COLUMNS = TextClassification(ColumnExamples)
