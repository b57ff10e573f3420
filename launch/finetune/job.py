"""Reads the task, model, tokenizer and examples of a fine-tuning run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.finetune.examples.base import Examples
from cloze.launch.finetune.glue import submission_names
from cloze.launch.finetune.kind import Kind
from cloze.launch.finetune.reading import check_fields, read_examples
from cloze.launch.finetune.tasks import KINDS, find_task
from cloze.launch.pretrained.source import Source, find_source
from cloze.launch.run import runs
from cloze.launch.training.best_checkpoint import with_metric
from cloze.launch.training.start_table import origin_of_rate
from cloze.model.bert import BertPreTrained
from cloze.model.flops import encoder_weights
from cloze.model.problems import HeadConfig
from cloze.pipeline.storage import sha256_of


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

    @property
    def facts(self) -> dict[str, str]:
        """Hashes of the inputs, which must be the same at a resume."""
        return {
            "train_hash": _hash(Path(self.config.train_file)),
            # by which the best checkpoint is chosen and the run may end
            runs.VALIDATION_HASH: _hash(Path(self.config.validation)),
            "tokenizer_fingerprint": self.source.tokenizer.fingerprint,
        }


def _hash(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder in the order of their names."""
    if path.is_file():
        return sha256_of(path)
    return json.dumps({file.name: sha256_of(file) for file in sorted(path.iterdir()) if file.is_file()})


def read_job(config: FinetuneConfig) -> Job:
    """Read the model, the tokenizer and every file.

    Raises:
        UserError, ModelError: one of them is missing, damaged or does not fit.
    """
    task = find_task(config.task)
    submission_names(config)  # errors in the columns are raised before anything is read
    kind: Kind = KINDS[task.kind].load()
    check_fields(config, task)
    kind.check_columns(config, task)
    task = kind.measured(config, task)
    source = find_source(config)
    shape, given = source.config, config.train.learning_rate
    size = encoder_weights(shape)
    kind.check_model(config, shape)
    config = with_metric(config, task.metrics[0])
    config = config.for_task(task, shape.max_position_embeddings, kind.pooling(source.pooling)).for_size(size)
    rate = origin_of_rate(given, size)
    architecture, head, train, validation, test = read_examples(
        config, task, source.tokenizer, shape.segments, shape.hidden_size
    )
    return Job(config.for_units(len(train)), task, kind, source, architecture, head, train, validation, test, rate)
