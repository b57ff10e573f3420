"""Checks that the model given to a command exists; imports no torch."""

from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.launch.config.model import ModelConfig
from cloze.launch.parsing import shipped
from cloze.launch.pretrained.finding import model_path
from cloze.launch.pretrained.hub import is_name
from cloze.launch.run import integrity, runs
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.tokenization.tokenizer import holds_tokenizer


def named_shape(model: str) -> Path | None:
    """The YAML file of a model configuration: by its path, or else the shipped one of this name; None if there is
    neither.
    """
    path = Path(model)
    if not path.exists():
        path = shipped("model").get(model, path)
    return path if path.suffix in (".yaml", ".yml") else None


def check_model(config: FinetuneConfig) -> None:
    """Raise UserError for a missing model, and for a model configuration without a tokenizer."""
    if is_url(config.model):
        return  # in a store, which may be slow and is checked later
    shape = named_shape(config.model)
    path = shape or Path(config.model)
    if not path.exists() and (shape is not None or not is_name(config.model)):
        raise UserError(
            f"model: found no {config.model}, expected a Cloze run, a Hugging Face folder or hub name, or "
            f"a file of configs/model/ or its name ({', '.join(shipped('model'))})"
        )
    if path.is_dir():
        runs.check_holds_model(path)
    if shape and config.tokenizer is None:
        raise UserError(
            f"tokenizer: found none, expected the folder of one: {config.model} is a shape without a "
            "vocabulary; add --tokenizer DIR"
        )


def check_used(config: ModelConfig) -> None:
    """Raise UserError for a missing model. A model on the hub is fetched; a store, which may be slow, is checked
    later.
    """
    if not is_url(config.model):
        runs.check_holds_model(model_path(config))


def check_tokenizer(config: ModelConfig) -> None:
    """Raise UserError for a folder without a tokenizer, of its own or of the run in it; otherwise as `check_used`."""
    if is_url(config.model):
        return
    folder = model_path(config)
    if not holds_tokenizer(integrity.tokenizer_folder(folder)):
        found = "no tokenizer in the folder" if folder.is_dir() else "no folder"
        raise UserError(
            f"model: found {found} {folder}, expected the folder of a tokenizer, which `cloze vocab` makes, of a "
            "Cloze run or of a Hugging Face model"
        )
