"""Which model a command uses, and how one that is named on the Hugging Face hub is fetched."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """How a model that is named on the Hugging Face hub is fetched."""

    revision: str | None = None
    """Branch, tag or commit of a hub model; null: its main branch."""
    cache_dir: str | None = None
    """Folder for files from the hub; null: the hub library's default."""
    offline: bool = False
    """Whether a hub model is only looked up in cache_dir; false: it is downloaded if it is not there."""
    pickled_weights: bool = False
    """Whether pytorch_model.bin of a hub model without model.safetensors is loaded; only tensors are read from it."""


@dataclass(frozen=True)
class ModelConfig(HubConfig):
    """A model to use, by folder or by name."""

    model: str
    """A Hugging Face folder of an encoder, the folder of a Cloze run or its URL in an object store, or the name of a
    hub model."""
