"""Checks that the files and the model given to a fine-tuning exist, before torch is imported."""

from __future__ import annotations

from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import find_task
from cloze.launch.pretrained.precheck import check_model
from cloze.pipeline.errors import UserError

# Formats of the files of examples by the kind of the task.
_FORMS = {
    "tagging": "CoNLL (a word a line with its tag behind, an empty line between sentences)",
    "answering": "SQuAD's JSON",
}
_TABLES = ".tsv, .csv, .jsonl, .parquet or a saved data set"


def check_inputs(config: FinetuneConfig) -> None:
    """Raise UserError for an unknown task, or a missing file, model or tokenizer."""
    form = _FORMS.get(find_task(config.task).kind, _TABLES)
    check_model(config)
    for flag, paths in (("train", [config.train_file]), ("validation", [config.validation]), ("test", config.test)):
        for path in paths:
            if not Path(path).exists():
                raise UserError(f"--{flag}: found no file {path}, expected examples: {form}; check the path")
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise UserError(f"tokenizer: found no folder {config.tokenizer}, expected the folder of one; check the path")
