"""Checks that the model given to `cloze evaluate` exists, before torch is imported."""

from __future__ import annotations

from pathlib import Path

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.pretrained.precheck import check_used
from cloze.launch.run import runs


def check_inputs(config: EvaluateConfig) -> None:
    """Raise UserError for a missing model; the folder of a checkpoint is checked when it is read."""
    if Path(config.model).resolve().parent.name != runs.CHECKPOINTS:
        check_used(config)
