"""Checks what is given to `cloze evaluate`, before torch is imported and minutes are spent."""

from pathlib import Path

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.pretrained.precheck import check_used
from cloze.launch.run import runs
from cloze.launch.system.pictures import check_library


def check_inputs(config: EvaluateConfig) -> None:
    """Raise UserError for a missing model (the folder of a checkpoint is checked when it is read), or matplotlib."""
    if config.picture:
        check_library("picture")
    if Path(config.model).resolve().parent.name != runs.CHECKPOINTS:
        check_used(config)
