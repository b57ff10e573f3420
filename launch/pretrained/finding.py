"""Finds the folder of a model that is named by a path, a hub name or a URL; imports no torch."""

import functools
from pathlib import Path
from typing import Literal

from cloze.launch.checkpoint.fetching import fetch_run
from cloze.launch.config.model import ModelConfig
from cloze.launch.pretrained.hub import fetch_model, is_name
from cloze.launch.system.console import Console
from cloze.pipeline.stores.places import StorePath, is_url, to_place


def model_path(config: ModelConfig, step: int | Literal["best"] | None = None) -> Path:
    """The local folder of a model: the folder of this name if there is one, else the hub library's; for a run in a
    store a temporary folder with the checkpoint `step`.

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
    """A temporary folder, removed with this process, with checkpoints of a run in an object store; fetched once,
    arguments as of `fetch_run`.
    """
    place = to_place(url)
    assert isinstance(place, StorePath), "of a URL"
    return fetch_run(place, step, count, warn=Console().warn)
