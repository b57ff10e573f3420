"""The interface of kinds of tasks: which fields they read, what their files hold, what is trained, saved and said."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.base import Examples
from cloze.launch.finetune.objective import FinetuningObjective
from cloze.launch.texts.settings import TRUNCATION, Truncation, described
from cloze.launch.texts.tables import COLUMNS, Columns, missing_columns, open_table
from cloze.launch.training.objective import TrainingObjective
from cloze.model.bert import BertPreTrained
from cloze.model.config import BertConfig, Pooling, VectorPooling
from cloze.model.problems import HeadConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.tokenization.tokenizer import Tokenizer

Read = tuple[type[BertPreTrained], HeadConfig | None, Examples, Callable[[str], Examples]]
"""The model's class, its head, the examples of the training file, and what reads those of another file."""
TABLE_FIELDS = ("text_columns", "label_columns", "skip_malformed_rows")
"""Fields that all kinds read whose files are tables."""


class Kind:
    """A kind of task: one instance for all runs."""

    fields: ClassVar[tuple[str, ...]] = ()
    """The fields that it reads among those that only some kinds read (`job.py`)."""
    saved_as: ClassVar[str | None] = None
    """The class that the saved model names; None: that of the trained model."""
    question: ClassVar[str]
    """The command for a prediction of the run `{run}`, without `cloze`."""

    def check(self, config: FinetuneConfig, task: Task) -> None:
        """Raise UserError for fields that contradict each other; reads nothing."""

    def check_model(self, config: FinetuneConfig, shape: BertConfig) -> None:
        """Raise UserError for fields that do not fit the model."""

    def columns(self, config: FinetuneConfig, task: Task) -> Columns | None:
        """The columns of a run's texts; None for files that are not tables, or whose columns differ."""
        return None

    def check_columns(self, config: FinetuneConfig, task: Task) -> None:
        """Raise UserError for all columns missing from the first rows of the files, before anything is loaded."""
        if columns := self.columns(config, task):
            _check_columns(config, task, columns)

    def measured(self, config: FinetuneConfig, task: Task) -> Task:
        """The task with the metrics of its validation file, if they depend on the file's columns.

        Raises:
            UserError: the columns of the file do not fit the task.
        """
        return task

    def pooling(self, learned: VectorPooling | None, has_pooler: bool) -> Pooling:
        """What pools a text's vectors if the run does not say.

        Args:
            learned: pooling of the model's text vectors; None if it was not trained for vectors.
            has_pooler: whether the model has a pooler of its own.
        """
        return "pooler"

    def joins(self, config: FinetuneConfig, task: Task) -> bool:
        """Whether the model reads pairs of texts, joined to one sequence."""
        return False

    def truncation(self, config: FinetuneConfig) -> Truncation | None:
        """How a run truncates long texts (for tagging: splits sentences between words); None if it truncates nothing
        (pieces, windows).
        """
        return None if config.keep == "pieces" else Truncation(config.lengths[0], config.keep, config.head_tokens)

    def read(self, config: FinetuneConfig, task: Task, tokenizer: Tokenizer, hidden_size: int) -> Read:
        """The model to train and its examples.

        Args:
            hidden_size: size of the model's vectors.

        Raises:
            UserError: a file does not hold what the task needs.
        """
        raise NotImplementedError

    def objective(self, config: FinetuneConfig, train: Any, rank: int) -> TrainingObjective:
        """The loss over the training examples that `read` has returned."""
        return FinetuningObjective(train)

    def next_command(self, config: FinetuneConfig, task: Task) -> str:
        """The command for a prediction, with `{run}` for the run."""
        return self.question

    def notes(self, config: FinetuneConfig, task: Task, train: Any) -> Fields:
        """Entries of the saved model's config.json about its texts.

        Args:
            train: the training examples that `read` has returned.
        """
        notes: Fields = {}
        if truncation := self.truncation(config):
            notes[TRUNCATION] = described(truncation)
        if columns := self.columns(config, task):
            notes[COLUMNS] = {name: value for name, value in asdict(columns).items() if value}
        return notes


def check_roles(texts: Mapping[str, Sequence[str]], targets: Iterable[str]) -> None:
    """Raise UserError for a column that is read as two texts, or as a text and as what is learned or measured.

    Args:
        texts: columns by the field that names them.
        targets: columns of labels or scores.
    """
    read: set[str] = set()
    for field, names in texts.items():
        for name in names:
            if name in read:
                raise UserError(f"{field}: found {name!r} twice, expected columns that differ; name another")
            read.add(name)
    if both := next((name for name in targets if name in read), None):
        raise UserError(
            f"label_columns: found {both!r}, which is read as text too, expected another column: a model that reads "
            "its answer learns nothing else"
        )


def _check_columns(config: FinetuneConfig, task: Task, columns: Columns) -> None:
    """Raise UserError for all columns missing from the first rows of a table's files, and for one with two roles."""
    targets = config.targets_of(task)
    check_roles({"text_columns": columns.texts + columns.prefix, "choice_columns": columns.choices}, targets)
    lacking: dict[tuple[Any, Any], list[str]] = {}  # files by their missing columns
    for path in config.files:
        found = open_table(path, columns.header, columns.texts[0], config.skip_malformed_rows).columns
        if path in config.test and task.diagnostic and set(task.diagnostic) <= set(found):
            continue
        needed = {
            "text_columns": columns.texts + columns.prefix,
            "choice_columns": columns.choices,
            "label_columns": () if path in config.test else targets,
        }
        missing = {field: [name for name in names if name not in found] for field, names in needed.items()}
        if any(missing.values()):
            finding = found, tuple((field, tuple(names)) for field, names in missing.items() if names)
            lacking.setdefault(finding, []).append(str(path))
    if lacking:
        raise UserError(
            "; ".join(
                str(missing_columns(", ".join(paths), found, dict(missing)))
                for (found, missing), paths in lacking.items()
            )
        )
