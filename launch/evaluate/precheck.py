"""Checks what is given to `cloze evaluate`, before torch is imported and minutes are spent."""

from pathlib import Path

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.pretrained.precheck import check_used
from cloze.launch.run import runs
from cloze.launch.system.pictures import check_library
from cloze.pipeline.storage import check_replaceable


def check_inputs(config: EvaluateConfig) -> None:
    """Raise UserError for a missing model (the folder of a checkpoint is checked when it is read) or matplotlib, and
    for a path where no result can be written.
    """
    if config.picture:
        check_library("picture")
    for path in (config.json, config.picture):
        if path:
            check_replaceable(Path(path))
    if Path(config.model).resolve().parent.name != runs.CHECKPOINTS:
        check_used(config)
