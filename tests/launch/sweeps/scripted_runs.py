"""Runs of a sweep that a script completes, and their configurations."""

import sys
from dataclasses import replace
from pathlib import Path

from cloze.launch.config import PretrainConfig
from cloze.launch.sweeps.run import Run


def scripted(folder: Path, name: str, awaited: Path | None = None) -> Run:
    return Run(name, folder / name, {}, [sys.executable, "-c", completing(folder / name, awaited)])


def completing(folder: Path, awaited: Path | None = None) -> str:
    """A script that completes a run once there is a file; without one, after a moment."""
    return COMPLETE.format(folder=str(folder), awaited=str(awaited or folder))


COMPLETE = """
import json, os, pathlib, time
here = pathlib.Path({folder!r})
here.mkdir(parents=True, exist_ok=True)
began = time.time()
(here / "began").touch()
time.sleep(0.2)
while not os.path.exists({awaited!r}):
    assert time.time() < began + 120
    time.sleep(0.01)
(here / "when").write_text(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), began, time.time()]))
for name in ("model/config.json", "predictions/validation.jsonl", "config.yaml", "data.json"):
    (here / name).parent.mkdir(exist_ok=True)
    (here / name).write_text("{{}}")
(here / "results.json").write_text('{{"metric": "accuracy", "validation": {{"accuracy": 0.5}}, "majority": {{}}}}')
(here / "aside").write_text('{{"state": "complete"}}')
os.replace(here / "aside", here / "status.json")  # as a run does: a sweep may read it at any moment
"""


def configured(fields: dict, folder: Path = Path("run")) -> PretrainConfig:
    config = PretrainConfig(data="data", output=str(folder))
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in fields.items()})
