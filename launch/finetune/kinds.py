"""The kinds of tasks: for each the model's class, its head and its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloze.launch.config import EmbeddingConfig, FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.answering import AnswerExamples
from cloze.launch.finetune.examples.base import Examples
from cloze.launch.finetune.examples.choice import ChoiceExamples
from cloze.launch.finetune.examples.classification import PROBLEMS, TextExamples
from cloze.launch.finetune.examples.contrastive import ContrastiveExamples
from cloze.launch.finetune.examples.similarity import check_files, columns_in, metrics_of, read_vectors
from cloze.launch.finetune.examples.tagging import Sentences, TagExamples, find_tags, read_conll, read_entities
from cloze.launch.texts.encoding import Answering, Truncation
from cloze.launch.texts.tables import Columns, Table, missing_columns, open_table, read_table
from cloze.model.bert import BertPreTrained
from cloze.model.config import BertConfig, HeadConfig
from cloze.model.sentences import POOLINGS, SentenceEncoder
from cloze.model.tasks import (
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_TABLES = ("classification", "regression", "multi_label", "columns", "choice")
_TEXTS = _TABLES[:-1]
# Fields that only some kinds of task read, with their defaults: other values are refused, not ignored.
_ONLY_FOR = {
    "pooling": ("pooler", (*_TEXTS, "embedding")),
    "keep": ("head", _TEXTS),
    "read_layers": ("last", (*_TEXTS, "tagging")),
    "embedding": (EmbeddingConfig(), ("embedding",)),
    "text_columns": ([], (*_TABLES, "embedding")),
    "label_columns": ([], (*_TABLES, "embedding")),
    "skip_malformed_rows": (False, (*_TABLES, "embedding")),
    "choice_columns": ([], ("choice",)),
    "labels": ([], ("classification", "multi_label", "choice", "tagging")),
    "answer_softmax": ("window", ("answering",)),
    "answer_units": ("words", ("answering",)),
}

Read = tuple[type[BertPreTrained], HeadConfig | None, Examples, Examples, Sequence[Examples]]


def truncation_of(config: FinetuneConfig, task: Task) -> Truncation | None:
    """How a run truncates long texts (for tagging: splits sentences between words); None if it truncates nothing
    (pieces, windows).
    """
    if task.kind == "answering" or config.keep == "pieces":
        return None
    return Truncation(config.lengths[0], config.keep, config.head_tokens)


def answering_of(config: FinetuneConfig) -> Answering:
    """How a question answering run finds answers."""
    return Answering(*config.lengths, config.max_answer_tokens, config.task == "squad2")


def check_fields(config: FinetuneConfig, task: Task) -> None:
    """Raise UserError for fields that the task does not read, or that contradict each other; reads nothing."""
    names = [Path(path).name.split(".")[0] for path in config.test]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"test: found {names.count(name)} files named {name}, expected names that differ, by which "
                "the results go; rename one"
            )
    for name, (usual, kinds) in _ONLY_FOR.items():
        # null in a user's configuration, a name in that of a run.
        plain = name == "pooling" and config.pooling is None or getattr(config, name) == usual
        if not plain and task.kind not in kinds:
            expected = "none" if usual == [] else "its defaults" if name == "embedding" else str(usual).lower()
            raise UserError(
                f"{name}: found {getattr(config, name)} with the task {config.task}, expected {expected}: "
                f"it is for {', '.join(kinds)}"
            )
    if len(set(config.labels)) < len(config.labels):
        raise UserError(f"labels: found {', '.join(config.labels)}, expected each once")
    if task.kind == "embedding":
        _check_embedding(config)
    if config.read_layers != "last" and config.pooling in (None, "pooler") and task.kind != "tagging":
        raise UserError(
            f"pooling: found pooler with read_layers {config.read_layers}, expected cls, mean or max: the "
            "pooler was made for the last layer; add --pooling cls"
        )
    texts = tuple(config.text_columns) or task.texts
    if config.keep == "pieces" and task.kind in _TEXTS and len(texts) > 1:
        raise UserError(
            f"keep: found pieces with a pair of texts ({', '.join(texts)}), expected one text; take head, "
            "tail or head_tail"
        )
    if task.kind == "choice" and len(config.label_columns) > 1:
        raise UserError(f"label_columns: found {', '.join(config.label_columns)}, expected one: the right choice")


def _check_embedding(config: FinetuneConfig) -> None:
    """Raise UserError for settings by which a headless encoder has nothing to train, or no vector."""
    if config.pooling == "pooler":
        raise UserError(
            f"pooling: found pooler with the task {config.task}, expected one of {', '.join(POOLINGS)}: "
            "sentence-transformers has no pooler"
        )
    if config.freeze in ("encoder", "below_0"):
        raise UserError(
            f"freeze: found {config.freeze} with the task {config.task}, expected none or below_1 and "
            "more: there is no head that could learn instead"
        )
    if config.unfreeze_every_epochs is not None:
        raise UserError(
            f"unfreeze_every_epochs: found {config.unfreeze_every_epochs:g} with the task {config.task}, "
            "expected null: there is no head that learns at first"
        )
    if len(config.label_columns) > 1:
        raise UserError(
            f"label_columns: found {', '.join(config.label_columns)} with the task {config.task}, expected "
            "one: that of the scores"
        )
    if config.train.global_batch_size < 2:
        raise UserError(
            f"train.global_batch_size: found {config.train.global_batch_size} with the task {config.task}, "
            "expected at least 2: the other rows of a batch are what a row is distinguished from"
        )


def check_shape(config: FinetuneConfig, shape: BertConfig, dropout_pairs: bool) -> None:
    """Raise UserError for sizes that are not below that of the model's vectors, and for dropout pairs without dropout.

    Args:
        shape: configuration of the model.
        dropout_pairs: whether each text is its own positive.
    """
    for size in config.embedding.dimensions:
        if size >= shape.hidden_size:
            raise UserError(
                f"embedding.dimensions: found {size}, expected less than {shape.hidden_size}, the size of "
                "the model's vectors, which is always trained"
            )
    rates = (
        [config.dropout]
        if config.dropout is not None
        else [shape.hidden_dropout_prob, shape.attention_output_dropout, shape.attention_probs_dropout_prob]
    )
    if dropout_pairs and not any(rates):
        raise UserError(
            f"dropout: found 0 with one column of texts ({config.text_columns[0]}), expected more: dropout "
            "alone makes a text's two vectors differ; add --dropout 0.1"
        )


def check_columns(config: FinetuneConfig, task: Task) -> None:
    """Raise UserError for all columns missing from the first rows of the files, before anything is loaded."""
    if task.kind == "embedding":
        check_files(config, task)
        return
    columns = columns_of_task(config, task)
    if columns is None:
        return
    targets = tuple(config.label_columns) or task.targets
    lacking: dict[tuple[Any, Any], list[str]] = {}  # files by their missing columns
    for path in (config.train_file, config.validation, *config.test):
        reading = open_table(path, columns.header, columns.texts[0], config.skip_malformed_rows)
        first = next(reading.rows)
        found = reading.columns or tuple(first.values)
        if path in config.test and task.diagnostic and set(task.diagnostic) <= set(found):
            continue
        needed = {
            "text_columns": columns.texts + columns.prefix,
            "choice_columns": columns.choices,
            "label_columns": () if path in config.test else targets,
        }
        missing = {field: [name for name in names if name not in found] for field, names in needed.items()}
        if any(missing.values()):
            finding = tuple(found), tuple((field, tuple(names)) for field, names in missing.items() if names)
            lacking.setdefault(finding, []).append(str(path))
    if lacking:
        raise UserError(
            "; ".join(
                str(missing_columns(", ".join(paths), found, dict(missing)))
                for (found, missing), paths in lacking.items()
            )
        )


def columns_of_task(config: FinetuneConfig, task: Task) -> Columns | None:
    """The columns of a run's texts; None for files that are not tables."""
    if task.kind not in _TABLES:
        return None
    texts = tuple(config.text_columns) or task.texts
    if task.kind != "choice":
        return Columns(texts, header=task.header)
    prefix = (task.choice_prefix,) if task.choice_prefix else ()
    return Columns(texts, tuple(config.choice_columns) or task.choices, prefix)


def measured_task(config: FinetuneConfig, task: Task) -> Task:
    """The task with the metrics of its validation file, if they depend on the file's columns.

    Raises:
        UserError: the columns of the file do not fit the task.
    """
    if task.kind != "embedding":
        return task
    return replace(task, metrics=metrics_of(columns_in(config, task, config.validation)))


def read_examples(
    config: FinetuneConfig, task: Task, tokenizer: Tokenizer, segments: tuple[int, int] = (0, 1), hidden_size: int = 0
) -> Read:
    """The model's class, its head, and the examples of the training, validation and test files.

    Args:
        segments, hidden_size: those of the model.

    Raises:
        UserError: a file does not hold what the task needs.
    """
    made = _READERS[task.kind](config, task, tokenizer)
    train, validation = made[2], made[3]
    for examples in (train, validation, *made[4]):
        examples.segments = segments
        if task.kind == "embedding":
            examples.width = hidden_size
    for examples, path in ((train, config.train_file), (validation, config.validation)):
        if not examples.labelled:
            raise UserError(f"{path}: found no labels, expected a file that holds what is to be predicted")
    return made


def _texts(config: FinetuneConfig, task: Task, tokenizer: Tokenizer) -> Read:
    texts = tuple(config.text_columns) or task.texts
    targets = tuple(config.label_columns) or task.targets
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
    if len(targets) > 1 and task.kind == "classification":
        raise UserError(
            f"label_columns: found {len(targets)} columns, expected one; label-columns is the task of several"
        )

    numbers = task.kind == "regression" or task.kind == "multi_label" and len(targets) > 1
    labels = None if numbers else tuple(config.labels) or task.labels

    def table(path: str) -> Table:
        return read_table(path, task.header, texts[0], config.skip_malformed_rows, labels)

    def examples(read: Table) -> TextExamples:
        measured, columns = task, (texts, targets)
        if task.diagnostic and set(task.diagnostic) <= set(read.columns):
            measured = replace(task, metrics=(*task.metrics, "matthews_correlation"))
            columns = task.diagnostic[:2], task.diagnostic[2:]
        return PROBLEMS[task.kind](read, measured, *columns, head, tokenizer, truncation_of(config, task))

    train = table(config.train_file)
    head = PROBLEMS[task.kind].find_head(task, targets, train, config.labels, config.pooling or "pooler")
    head = replace(head, layers=config.read_layers)
    if config.keep == "pieces":
        head = replace(head, pieces=config.piece_pooling, piece_length=length, piece_step=step)
    test = [examples(table(path)) for path in config.test]
    return BertForSequenceClassification, head, examples(train), examples(table(config.validation)), test


def _tags(config: FinetuneConfig, task: Task, tokenizer: Tokenizer) -> Read:
    read_file = read_conll if task.metrics[0] == "accuracy" else read_entities
    sentences = read_file(config.train_file)
    head = find_tags(sentences, config.labels)
    if config.read_layers != "last":
        head = replace(head, layers=config.read_layers, pooling="cls")  # nothing is pooled; cls works for any model

    def examples(read: Sentences) -> TagExamples:
        return TagExamples(read, task, head, tokenizer, config.lengths[0], sentences.by_character)

    test = [examples(read_file(path)) for path in config.test]
    return BertForTokenClassification, head, examples(sentences), examples(read_file(config.validation)), test


def _answers(config: FinetuneConfig, task: Task, tokenizer: Tokenizer) -> Read:
    def examples(path: str) -> AnswerExamples:
        return AnswerExamples(path, config, tokenizer, config.task == "squad2")

    train, validation, *test = [examples(path) for path in (config.train_file, config.validation, *config.test)]
    return BertForQuestionAnswering, None, train, validation, test


def _choices(config: FinetuneConfig, task: Task, tokenizer: Tokenizer) -> Read:
    shared = tuple(config.text_columns) or task.texts
    choices = tuple(config.choice_columns) or task.choices
    (target,) = config.label_columns or task.targets
    labels = tuple(config.labels) or task.labels or tuple(str(number) for number in range(len(choices)))
    if len(labels) != len(choices):
        raise UserError(
            f"choice_columns: found {len(choices)} ({', '.join(choices)}) with {len(labels)} labels "
            f"({', '.join(labels)}), expected as many; name them with --labels"
        )

    def examples(path: str) -> ChoiceExamples:
        table = read_table(path, (), "", config.skip_malformed_rows, labels)
        return ChoiceExamples(table, task, shared, choices, target, labels, tokenizer, truncation_of(config, task))

    train, validation, *test = [examples(path) for path in (config.train_file, config.validation, *config.test)]
    return BertForMultipleChoice, None, train, validation, test


def _vectors(config: FinetuneConfig, task: Task, tokenizer: Tokenizer) -> Read:
    truncation = truncation_of(config, task)
    assert truncation is not None, "check_fields refuses pieces"

    def table(path: str) -> Table:
        return read_table(path, (), "", config.skip_malformed_rows)

    columns = tuple(config.text_columns) or task.texts
    train = ContrastiveExamples(table(config.train_file), columns, tokenizer, truncation)
    validation, *test = [
        read_vectors(table(path), config, task, tokenizer, truncation) for path in (config.validation, *config.test)
    ]
    return SentenceEncoder, None, train, validation, test


_READERS = {
    **dict.fromkeys(("classification", "regression", "multi_label", "columns"), _texts),
    "tagging": _tags,
    "answering": _answers,
    "choice": _choices,
    "embedding": _vectors,
}
