"""Checks what is given to `cloze evaluate`, before torch is imported and minutes are spent."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.pretrained.precheck import check_used
from cloze.launch.run import runs
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install


def check_inputs(config: EvaluateConfig) -> None:
    """Raise UserError for a missing model (the folder of a checkpoint is checked when it is read), or matplotlib."""
    if config.picture and find_spec("matplotlib") is None:
        raise UserError(f"picture: found no matplotlib, expected it for pictures; {how_to_install('pictures')}")
    if Path(config.model).resolve().parent.name != runs.CHECKPOINTS:
        check_used(config)
