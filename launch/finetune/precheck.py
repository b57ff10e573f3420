"""Checks that the files and the model given to a fine-tuning exist, before torch is imported."""

from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.launch.finetune.tasks import KINDS, find_task
from cloze.launch.pretrained.precheck import check_model
from cloze.pipeline.errors import UserError


def check_inputs(config: FinetuneConfig) -> None:
    """Raise UserError for an unknown task, or a missing file, model or tokenizer."""
    form = KINDS[find_task(config.task).kind].files
    check_model(config)
    for flag, paths in (("train", [config.train_file]), ("validation", [config.validation]), ("test", config.test)):
        for path in paths:
            if not Path(path).exists():
                raise UserError(f"--{flag}: found no file {path}, expected examples: {form}; check the path")
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise UserError(f"tokenizer: found no folder {config.tokenizer}, expected the folder of one; check the path")
