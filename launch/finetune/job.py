"""Checks the fields of a fine-tuning run, and reads its task, model, tokenizer and examples."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloze.launch.checkpoint.completion import with_metric
from cloze.launch.config import EmbeddingConfig, FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.base import Examples
from cloze.launch.finetune.glue import submission_names
from cloze.launch.finetune.kind import Kind
from cloze.launch.finetune.tasks import KINDS, find_task
from cloze.launch.pretrained.source import Source, find_source
from cloze.launch.run import runs
from cloze.launch.training.start_table import origin_of_rate
from cloze.model.bert import BertPreTrained
from cloze.model.flops import encoder_weights
from cloze.model.problems import HeadConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import check_regular


@dataclass(frozen=True)
class Job:
    """The inputs of a fine-tuning run: its examples, its model, and the configuration completed from them."""

    config: FinetuneConfig
    """The configuration, with the fields filled in that the files and the model decide."""
    task: Task
    kind: Kind
    source: Source
    architecture: type[BertPreTrained]
    head: HeadConfig | None
    train: Examples
    validation: Examples
    test: Sequence[Examples]
    rate: str
    """The origin of its peak learning rate."""
    hashes: dict[str, str]
    """Of its files, by path, as they were read."""

    @property
    def test_hashes(self) -> dict[str, str]:
        """Of the test files, by name; a resume may have others."""
        return {each.name: self.hashes[path] for each, path in zip(self.test, self.config.test, strict=True)}

    @property
    def facts(self) -> dict[str, str]:
        """Hashes of the inputs, which must be the same at a resume. At the model's path another one may lie. A run of
        pretraining is known by its start and its data: it may have a newer checkpoint, and a resume goes on from the
        one that it began with.
        """
        return {
            "train_hash": self.hashes[self.config.train_file],
            # by which the best checkpoint is chosen and the run may end
            runs.VALIDATION_HASH: self.hashes[self.config.validation],
            **({} if self.source.identity is None else {runs.MODEL_HASH: self.source.identity}),
            "tokenizer_fingerprint": self.source.tokenizer.fingerprint,
        }


def _hash(path: Path) -> str:
    """SHA-256 of a file, or of all files of a saved data set in the order of their names, but for those that `datasets`
    keeps there of what was made of it.
    """
    if path.is_file():
        return sha256_of(path)
    return json.dumps({file.name: sha256_of(file) for file in _files_of(path)})


def _files_of(path: Path) -> list[Path]:
    """None of what is not there, which whoever reads it says."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith("cache-")]


def _states(paths: Iterable[str]) -> dict[str, list[tuple[Path, int, int, int, int]]]:
    """What tells each path's files from what they were, or from others in their place."""
    return {
        path: [
            (file, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            for file in _files_of(Path(path))
            if (found := file.stat())
        ]
        for path in paths
    }


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


def _check_fields(config: FinetuneConfig, task: Task, kind: Kind) -> None:
    """Raise UserError for fields that the task does not read, or that contradict each other; reads nothing."""
    names = [Path(path).name.split(".")[0] for path in config.test]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"test: found {names.count(name)} files named {name}, expected names that differ, by which "
                "the results go; rename one"
            )
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
    if len(set(config.labels)) < len(config.labels) or not all(label.strip() for label in config.labels):
        raise UserError(f"labels: found {', '.join(config.labels)}, expected names, each once")
    kind.check(config, task)


def read_examples(
    config: FinetuneConfig, task: Task, tokenizer: Tokenizer, segments: tuple[int, int] = (0, 1), hidden_size: int = 0
) -> tuple[type[BertPreTrained], HeadConfig | None, Examples, Examples, list[Examples]]:
    """The model's class, its head, and the examples of the training, validation and test files.

    Args:
        segments, hidden_size: those of the model.

    Raises:
        UserError: a file does not hold what the task needs.
    """
    kind: Kind = KINDS[task.kind].load()
    architecture, head, train, read_file = kind.read(config, task, tokenizer, hidden_size)
    validation, *test = [read_file(path) for path in (config.validation, *config.test)]
    for examples, path in zip((train, validation, *test), config.files, strict=True):
        examples.name, examples.segments = Path(path).name.split(".")[0], segments
    for examples, path in zip((train, validation), config.files, strict=False):
        if not examples.labelled:
            raise UserError(f"{path}: found no labels, expected a file that holds what is to be predicted")
    return architecture, head, train, validation, test


def read_job(config: FinetuneConfig) -> Job:
    """Read the model, the tokenizer and every file.

    Raises:
        UserError, ModelError: one of them is missing, damaged or does not fit.
    """
    task = find_task(config.task)
    submission_names(config)  # errors in the columns are raised before anything is read
    kind: Kind = KINDS[task.kind].load()
    _check_fields(config, task, kind)
    for path in map(Path, config.files):
        if not path.is_dir():  # as a saved data set
            check_regular(path)  # each is read more than once
    states = _states(config.files)
    hashes = {path: _hash(Path(path)) for path in config.files}
    kind.check_columns(config, task)
    task = kind.measured(config, task)
    source = find_source(config)
    shape, given = source.config, config.train.learning_rate
    size = encoder_weights(shape)
    kind.check_model(config, shape)
    config = with_metric(config, task.metrics[0])
    pooling = kind.pooling(source.pooling, shape.pooler)
    config = config.for_task(task, shape.max_position_embeddings, pooling).for_size(size)
    rate = origin_of_rate(given, size)
    architecture, head, train, validation, test = read_examples(
        config, task, source.tokenizer, shape.segments, shape.hidden_size
    )
    config = config.for_units(len(train))
    if changed := [path for path, state in _states(config.files).items() if state != states[path]]:
        raise UserError(
            f"{changed[0]}: changed while it was read, expected a file at rest; run the same command again when it is"
        )
    return Job(config, task, kind, source, architecture, head, train, validation, test, rate, hashes)
