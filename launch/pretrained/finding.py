"""Finds the folder of a model that is named by a path, a hub name or a URL; imports torch for a URL only."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

from cloze.launch.config.model import ModelConfig
from cloze.launch.pretrained.hub import fetch_model, is_name
from cloze.launch.system.console import Console
from cloze.launch.system.environment import fewer_imports, prepare_deepspeed, read_environment
from cloze.pipeline.stores.places import is_url, to_place


def model_path(config: ModelConfig, step: int | Literal["best"] | None = None) -> Path:
    """Where a model lies: a folder, if there is one of this name, else what the hub library keeps; of a run in a store
    a folder with the checkpoint that `step` names.

    Raises:
        UserError: as `fetch_model` and `fetched_run`.
    """
    if is_url(config.model):
        return fetched_run(config.model, step)
    if Path(config.model).exists() or not is_name(config.model):
        return Path(config.model)
    return fetch_model(config.model, config)


@functools.cache
def fetched_run(url: str, step: int | Literal["best"] | None = None, count: int = 1) -> Path:
    """A folder of this machine, for as long as this process lives, with what is asked for of a run in an object store:
    as `checkpoint.fetch_run`, once.
    """
    return checkpoint_room().fetch_run(to_place(url), step, count, Console().warn)


def checkpoint_room() -> ModuleType:
    """The room of checkpoints. Their files are DeepSpeed's, whose import takes a second: a model's folder does not wait
    for it.
    """
    if "deepspeed" not in sys.modules:
        prepare_deepspeed(read_environment())  # which it wants before it is imported
    with fewer_imports():
        from cloze.launch import checkpoint

    return checkpoint
