"""What all kinds of tasks have in common: the check of a run's fields, the reading of its files."""

from pathlib import Path

from cloze.launch.config import EmbeddingConfig, FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.kind import Kind, Read
from cloze.launch.finetune.tasks import KINDS
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer

# Fields that only some kinds of task read (`Kind.fields`), with their defaults: other values are refused, not ignored.
_USUAL = {
    "pooling": "pooler",
    "keep": "head",
    "read_layers": "last",
    "embedding": EmbeddingConfig(),
    "text_columns": [],
    "label_columns": [],
    "skip_malformed_rows": False,
    "choice_columns": [],
    "labels": [],
    "answer_softmax": "window",
    "answer_units": "words",
}


def check_fields(config: FinetuneConfig, task: Task) -> None:
    """Raise UserError for fields that the task does not read, or that contradict each other; reads nothing."""
    names = [Path(path).name.split(".")[0] for path in config.test]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"test: found {names.count(name)} files named {name}, expected names that differ, by which "
                "the results go; rename one"
            )
    kind: Kind = KINDS[task.kind].load()
    for name, usual in _USUAL.items():
        # null in a user's configuration, a name in that of a run.
        plain = name == "pooling" and config.pooling is None or getattr(config, name) == usual
        if not plain and name not in kind.fields:
            expected = "none" if usual == [] else "its defaults" if name == "embedding" else str(usual).lower()
            readers = [each for each, entry in KINDS.items() if name in entry.load().fields]
            raise UserError(
                f"{name}: found {getattr(config, name)} with the task {config.task}, expected {expected}: "
                f"it is for {', '.join(readers)}"
            )
    if len(set(config.labels)) < len(config.labels):
        raise UserError(f"labels: found {', '.join(config.labels)}, expected each once")
    kind.check(config, task)


def read_examples(
    config: FinetuneConfig, task: Task, tokenizer: Tokenizer, segments: tuple[int, int] = (0, 1), hidden_size: int = 0
) -> Read:
    """The model's class, its head, and the examples of the training, validation and test files.

    Args:
        segments, hidden_size: those of the model.

    Raises:
        UserError: a file does not hold what the task needs.
    """
    kind: Kind = KINDS[task.kind].load()
    architecture, head, train, validation, test = kind.read(config, task, tokenizer, hidden_size)
    for examples in (train, validation, *test):
        examples.segments = segments
    for examples, path in ((train, config.train_file), (validation, config.validation)):
        if not examples.labelled:
            raise UserError(f"{path}: found no labels, expected a file that holds what is to be predicted")
    return architecture, head, train, validation, test
