"""The process of a run on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloze.launch.config import PretrainConfig
from cloze.launch.system.console import Console
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training import process
from cloze.pipeline.errors import UserError


def test_the_collectives_of_a_run_on_gpus_lie_beside_its_heartbeats(monkeypatch, tmp_path):
    """The folder is there before the processes join, and the settings too."""
    found = {}

    def join(environment):
        found.update(os.environ)
        raise UserError("enough")

    monkeypatch.setattr(process, "device_type", lambda: "cuda")
    monkeypatch.setattr(process.distributed, "initialize", join)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    config = PretrainConfig(data="d", output=str(tmp_path / "run"))
    with pytest.raises(UserError, match="enough"):
        with process.joined(config, {}, Environment(), Console(True)):
            pass
    prefix = Path(found["TORCH_FR_DUMP_TEMP_FILE"])
    assert prefix.parent == tmp_path / "run/heartbeats" and prefix.parent.is_dir()
