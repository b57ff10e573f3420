"""Pickled files of checkpoints are read as weights and few classes of DeepSpeed only."""

from pathlib import Path

import pytest
import torch

from cloze.launch.checkpoint import ALLOWED_CLASSES, load_pickled
from cloze.pipeline.errors import UserError


def test_only_deepspeeds_own_classes_are_allowed(tmp_path):
    assert {kind.__name__ for kind in ALLOWED_CLASSES} == {
        "LossScaler",
        "DynamicLossScaler",
        "fragment_address",
        "ZeroStageEnum",
    }
    torch.save({"path": Path("x")}, tmp_path / "file.pt")
    with pytest.raises(UserError, match="other than tensors"):
        load_pickled(tmp_path / "file.pt")
