"""From a folder to a model that is ready for use, or to the weights of a run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from cloze.launch.config.model import ModelConfig
from cloze.launch.pretrained.hub import fetch_model, is_name
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.run import runs
from cloze.launch.system.console import Console
from cloze.launch.system.environment import prepare_deepspeed, read_environment
from cloze.launch.texts.encoding import ANSWERING, TRUNCATION, Answering, Truncation
from cloze.launch.texts.tables import COLUMNS, columns_of
from cloze.launch.texts.vectors import VECTORS, Vectors
from cloze.model.bert import BertForPreTraining
from cloze.model.config import check_kinds
from cloze.model.huggingface import check_finite, load_note
from cloze.model.tasks import saved_class
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url, to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_PARTS = ("bert.", "masked_lm.", "next_sentence.")  # of BertForPreTraining


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
    return fetch_model(config.model, revision=config.revision, cache_dir=config.cache_dir, offline=config.offline,
                       pickled=config.pickled_weights)


def load_model(folder: str | Path, step: int | Literal["best"] | None = None) -> LoadedModel:
    """From a Hugging Face folder of a BERT, or a Cloze run (of pretraining: the checkpoint `step`, that of the best
    evaluation, or None: the newest good one).

    Raises:
        UserError, ModelError: the folder holds neither, or something in it is damaged, or it has no such checkpoint.
    """
    folder = fetched_run(folder, step) if is_url(folder) else Path(folder)
    runs.check_holds_model(folder)
    tokenizer = Tokenizer.from_folder(runs.tokenizer_folder(folder))
    if runs.is_pretraining(folder):
        model = BertForPreTraining(runs.model_config(folder))
        found, weights = read_run_weights(folder, step)
        check_finite(weights, f"step {found} of {folder}")
        model.load_state_dict(weights)
        length = runs.trained_length(folder)
        return _computing(LoadedModel(model, tokenizer, str(folder), length and Truncation(length)))
    if step is not None:
        raise UserError(f"step: found {step} with {folder}, which is one model, expected none; leave --step out")
    folder = runs.model_folder(folder)
    return _computing(LoadedModel(saved_class(folder).from_folder(folder), tokenizer, str(folder),
                                  load_truncation(folder), _noted(folder, ANSWERING, Answering),
                                  columns_of(load_note(folder, COLUMNS)), load_vectors(folder)))


@functools.cache
def fetched_run(url: str, step: int | Literal["best"] | None = None, count: int = 1) -> Path:
    """A folder of this machine, for as long as this process lives, with what is asked for of a run in an object store:
    as `checkpoint.fetch_run`, once.
    """
    return _checkpoints().fetch_run(to_place(url), step, count, Console().warn)


def load_truncation(folder: Path) -> Truncation | None:
    """How a model in a folder has learned to cut long texts; None if it says nothing. Raises UserError, ModelError."""
    return _noted(folder, TRUNCATION, Truncation)


def load_vectors(folder: Path) -> Vectors | None:
    """How a model in a folder has learned to make vectors of texts; None if it hasn't. Raises UserError, ModelError."""
    return _noted(folder, VECTORS, Vectors)


def _noted(folder: Path, name: str, kind: type):
    """A note of config.json as the dataclass that it was. Raises UserError, ModelError for one that isn't."""
    fields = load_note(folder, name)
    if fields is None:
        return None
    try:
        noted = kind(**fields)
    except TypeError as error:
        raise UserError(f"{folder / 'config.json'}: {name}: found {str(fields)[:60]} ({error}), expected the fields of "
                        "a model that Cloze has trained; export it again") from error
    check_kinds(name, noted)
    return noted


def _computing(loaded: LoadedModel) -> LoadedModel:
    """The model, once it has read an empty text: of weights that are too large nothing comes but NaN.

    Raises:
        UserError: the vectors are not finite.
    """
    special = loaded.tokenizer.special_tokens
    inputs = {"input_ids": [special.classification, special.separator], "sequence_offsets": [0, 2]}
    if loaded.config.type_vocab_size > 1:
        inputs["token_type_ids"] = [loaded.config.segments[0]] * 2
    kinds = {"sequence_offsets": torch.int32}
    tensors = {name: torch.tensor(values, dtype=kinds.get(name, torch.int64), device=loaded.device)
               for name, values in inputs.items()}
    with torch.inference_mode():
        encoder = getattr(loaded.model, "bert", loaded.model)
        vectors = encoder(**tensors, max_sequence_length=2).last_hidden_state
    if not vectors.isfinite().all():
        raise UserError(f"{loaded.source}: found a model whose vectors are not finite (NaN), expected numbers; its "
                        "weights are damaged: take an earlier checkpoint, or fetch the model again")
    return loaded


def read_run_weights(run: Path, step: int | Literal["best"] | None = None, warn: Callable[[str], None] = print
                     ) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and whole fp32 weights of the model in a run's checkpoint, as `checkpoint.read_weights`, in any program."""
    found, weights = _checkpoints().read_weights(run, step, warn)
    return found, _of_model(weights)


def read_run_average(run: Path, count: int, step: int | Literal["best"] | None = None,
                     warn: Callable[[str], None] = print) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Steps and mean weights of several checkpoints, as `checkpoint.read_average`, in any program."""
    steps, weights = _checkpoints().read_average(run, count, step, warn)
    return steps, _of_model(weights)


def _of_model(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of BERT and its heads, without what an objective has added to train them."""
    return {name: value for name, value in weights.items() if name.startswith(_PARTS)}


def run_steps(run: Path) -> list[int]:
    """Steps of a run's published checkpoints, as `checkpoint.checkpoint_steps`, in any program."""
    return _checkpoints().checkpoint_steps(run)


def _checkpoints() -> ModuleType:
    """The room of checkpoints. Their files are DeepSpeed's, whose import takes a second: a model's folder does not wait
    for it.
    """
    if "deepspeed" not in sys.modules:
        prepare_deepspeed(read_environment())  # which it wants before it is imported
    from cloze.launch import checkpoint

    return checkpoint
