"""From a folder to a model that is ready for use, or to the weights of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.run import runs
from cloze.launch.system.environment import prepare_deepspeed, read_environment
from cloze.launch.texts.encoding import ANSWERING, TRUNCATION, Answering, Truncation
from cloze.launch.texts.tables import COLUMNS, columns_of
from cloze.model.bert import BertForPreTraining
from cloze.model.huggingface import load_note
from cloze.model.tasks import saved_class
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def load_model(folder: str | Path) -> LoadedModel:
    """From a Hugging Face folder of a BERT, or a Cloze run (of pretraining: its newest good checkpoint).

    Raises:
        UserError, ModelError: the folder holds neither, or something in it is damaged.
    """
    folder = Path(folder)
    runs.check_holds_model(folder)
    tokenizer = Tokenizer.from_folder(runs.tokenizer_folder(folder))
    if runs.is_pretraining(folder):
        model = BertForPreTraining(runs.model_config(folder))
        model.load_state_dict(read_run_weights(folder)[1])
        return LoadedModel(model, tokenizer, str(folder))
    folder = runs.model_folder(folder)
    truncation, answering = load_note(folder, TRUNCATION), load_note(folder, ANSWERING)
    return LoadedModel(saved_class(folder).from_folder(folder), tokenizer, str(folder),
                       truncation and Truncation(**truncation), answering and Answering(**answering),
                       columns_of(load_note(folder, COLUMNS)))


def read_run_weights(run: Path, step: int | Literal["best"] | None = None, warn: Callable[[str], None] = print
                     ) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and whole fp32 weights of a run's checkpoint, as `checkpoint.read_weights`, in any program."""
    if "deepspeed" not in sys.modules:
        prepare_deepspeed(read_environment())  # which it wants before it is imported
    # A checkpoint's files are DeepSpeed's, whose import takes a second: a model's folder does not wait for it.
    from cloze.launch.checkpoint import read_weights

    return read_weights(run, step, warn)
