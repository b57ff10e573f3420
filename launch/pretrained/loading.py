"""From a folder to a model that is ready for use, or to the weights of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.run import runs
from cloze.launch.system.environment import prepare_deepspeed, read_environment
from cloze.launch.texts.encoding import ANSWERING, TRUNCATION, Answering, Truncation
from cloze.model.bert import BertForPreTraining
from cloze.model.huggingface import load_note
from cloze.model.tasks import saved_class
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def load_model(folder: str | Path, step: int | Literal["best"] | None = None) -> LoadedModel:
    """From a Hugging Face folder of a BERT, or a Cloze run (of pretraining: the checkpoint `step`, that of the best
    evaluation, or None: the newest good one).

    Raises:
        UserError, ModelError: the folder holds neither, or something in it is damaged, or it has no such checkpoint.
    """
    folder = Path(folder)
    runs.check_holds_model(folder)
    tokenizer = Tokenizer.from_folder(runs.tokenizer_folder(folder))
    if runs.is_pretraining(folder):
        model = BertForPreTraining(runs.model_config(folder))
        model.load_state_dict(read_run_weights(folder, step)[1])
        return LoadedModel(model, tokenizer, str(folder))
    if step is not None:
        raise UserError(f"step: found {step} with {folder}, which is one model, expected none; leave --step out")
    folder = runs.model_folder(folder)
    truncation, answering = load_note(folder, TRUNCATION), load_note(folder, ANSWERING)
    return LoadedModel(saved_class(folder).from_folder(folder), tokenizer, str(folder),
                       truncation and Truncation(**truncation), answering and Answering(**answering))


def read_run_weights(run: Path, step: int | Literal["best"] | None = None, warn: Callable[[str], None] = print
                     ) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and whole fp32 weights of a run's checkpoint, as `checkpoint.read_weights`, in any program."""
    return _checkpoints().read_weights(run, step, warn)


def read_run_average(run: Path, count: int, step: int | Literal["best"] | None = None,
                     warn: Callable[[str], None] = print) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Steps and mean weights of several checkpoints, as `checkpoint.read_average`, in any program."""
    return _checkpoints().read_average(run, count, step, warn)


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
