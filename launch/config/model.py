"""Which model a command uses, and how one that is named on the Hugging Face hub is fetched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """How a model is fetched that is named on the Hugging Face hub."""

    revision: str | None = None
    """Branch, tag or commit of a hub name; null: its main branch."""
    cache_dir: str | None = None
    """Folder that keeps what comes from the hub; null: the hub library's own."""
    offline: bool = False
    """Whether a hub name is only looked up in that folder; false: it is fetched where it is not there."""
    pickled_weights: bool = False
    """Whether pytorch_model.bin of a hub name is taken where it has no model.safetensors; read as tensors only."""


@dataclass(frozen=True)
class ModelConfig(HubConfig):
    """A model to use, by folder or by name."""

    model: str
    """A Hugging Face folder of a BERT, the folder of a Cloze run or its URL in an object store, or the name of a hub
    model."""
