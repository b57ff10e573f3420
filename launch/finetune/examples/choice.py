"""Multiple choice: which of several texts continues another."""

import numpy as np

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.base import remarks
from cloze.launch.finetune.examples.classification import ClassExamples, has_labels, label_of, number_of
from cloze.launch.finetune.kind import TABLE_FIELDS, Kind, Read
from cloze.launch.texts.sequences import build_sequences
from cloze.launch.texts.settings import Truncation
from cloze.launch.texts.tables import Columns, Table, read_table
from cloze.model.problems import HeadConfig
from cloze.model.tasks import BertForMultipleChoice
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.tokenization.tokenizer import Tokenizer


class ChoiceExamples(ClassExamples):
    """A sequence `[CLS] shared [SEP] choice [SEP]` for each choice, with one score each; the classes are the choices.

    Args:
        shared: columns whose texts are joined to the first segment.
        choices: columns of the choices; `task.choice_prefix` names one whose text each of them begins with.
    """

    def __init__(
        self,
        table: Table,
        task: Task,
        shared: tuple[str, ...],
        choices: tuple[str, ...],
        target: str,
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        truncation: Truncation | None,
    ) -> None:
        prefix = (task.choice_prefix,) if task.choice_prefix else ()
        self._texts = (*shared, *prefix, *choices)
        table.need(self._texts, "text_columns")
        self._rows, self._task, self._head = table.rows, task, HeadConfig(labels)
        first = [" ".join(row.text(column) for column in shared) for row in table.rows for _ in choices]
        second = [
            " ".join(row.text(column) for column in (*prefix, choice)) for row in table.rows for choice in choices
        ]
        assert truncation is not None, "only texts are read in pieces"
        self._sequences, cut = build_sequences(tokenizer, first, second, truncation)
        self.width = len(choices)
        self.lengths = self._sequences.lengths.reshape(-1, self.width).sum(1)
        self.labelled = has_labels(table, (target,), labels)
        if self.labelled:
            fix = "fix the row, or name the label of each choice with --labels"
            self._true = np.array([number_of(row, label_of(row, target), labels, fix) for row in table.rows])
        self.measured = "accuracy"
        texts = [[row.text(column) for column in self._texts] for row in table.rows]
        rows = f"{len(self):,} rows of {self.width} choices{remarks(texts, tokenizer)}"
        self.facts = f"{rows}, {self.lengths.sum():,} tokens, {cut}"

    def sequences(self, units: np.ndarray) -> np.ndarray:
        return (units[:, None] * self.width + np.arange(self.width)).reshape(-1)

    def batch(self, units: np.ndarray) -> MicroBatch:
        return super().batch(units) | {"num_choices": self.width}


class MultipleChoice(Kind):
    """One of several texts that continues another."""

    fields = (*TABLE_FIELDS, "choice_columns", "labels")
    question = 'predict choose {run} "TEXT" "CHOICE" "CHOICE"'

    def check(self, config: FinetuneConfig, task: Task) -> None:
        if len(config.label_columns) > 1:
            raise UserError(f"label_columns: found {', '.join(config.label_columns)}, expected one: the right choice")

    def joins(self, config: FinetuneConfig, task: Task) -> bool:
        return True

    def columns(self, config: FinetuneConfig, task: Task) -> Columns:
        prefix = (task.choice_prefix,) if task.choice_prefix else ()
        return Columns(config.texts_of(task), config.choices_of(task), prefix)

    def read(self, config: FinetuneConfig, task: Task, tokenizer: Tokenizer, hidden_size: int) -> Read:
        shared = config.texts_of(task)
        choices = config.choices_of(task)
        (target,) = config.targets_of(task)
        labels = tuple(config.labels) or task.labels or tuple(str(number) for number in range(len(choices)))
        if len(labels) != len(choices):
            raise UserError(
                f"choice_columns: found {len(choices)} ({', '.join(choices)}) with {len(labels)} labels "
                f"({', '.join(labels)}), expected as many; name them with --labels"
            )

        def examples(path: str) -> ChoiceExamples:
            table = read_table(path, skip_malformed=config.skip_malformed_rows, labels=labels)
            return ChoiceExamples(table, task, shared, choices, target, labels, tokenizer, self.truncation(config))

        return BertForMultipleChoice, None, examples(config.train_file), examples


CHOICE = MultipleChoice()
