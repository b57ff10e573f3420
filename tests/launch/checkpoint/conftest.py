"""Checkpoints that have only what makes them some."""

import json

import pytest

from cloze.launch.checkpoint.state import CHECKSUMS
from cloze.pipeline.storage import sha256_of


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run/checkpoints"
    for step in (1, 2, 3, 4):
        path = folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "state.json").write_text(json.dumps({"step": step, "world_size": 1, "zero_stage": 0}))
        (path / "weights.pt").write_bytes(bytes([step]) * 100)
        parts = {part.name: (part.stat().st_size, sha256_of(part)) for part in path.iterdir()}
        (path / CHECKSUMS).write_text(json.dumps(parts))
    return folder
