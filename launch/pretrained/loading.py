"""Loads a model from a folder, or the weights of a run."""

import json
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch

from cloze.launch.pretrained.finding import fetched_run
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.pretrained.origin import check_tokenizer
from cloze.launch.pretrained.sentence_transformers import read_max_length, read_pooling
from cloze.launch.run import integrity, runs
from cloze.launch.system.console import Console
from cloze.launch.system.devices import to_device
from cloze.launch.system.environment.process import importing_deepspeed
from cloze.launch.texts.settings import ANSWERING, TRUNCATION, VECTORS, Answering, Truncation, Vectors
from cloze.launch.texts.tables import COLUMNS, columns_of
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig, check_kinds
from cloze.model.config_files import read_object
from cloze.model.huggingface import check_finite, check_sizes, load_note
from cloze.model.tasks import BertForReplacedTokenDetection, saved_class
from cloze.model.weight_names import StateDict, architecture_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.loading.collate import concatenated
from cloze.pipeline.samples.assembly import assemble
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.tokenization.backends import read_tokenizer_config
from cloze.pipeline.tokenization.tokenizer import Tokenizer

# Of BertForPreTraining, and of ELECTRA's discriminator.
_PARTS = ("bert.", "masked_lm.", "next_sentence.", "detection.")


def load_model(folder: str | Path, step: int | Literal["best"] | None = None) -> LoadedModel:
    """Load a Hugging Face folder of an encoder, or a Cloze run (of pretraining: the checkpoint `step`; "best": the one
    of the best evaluation; None: the newest good one).

    Raises:
        UserError, ModelError: the folder holds neither, is damaged, or has no such checkpoint.
    """
    _check_step(step)
    folder = fetched_run(folder, step) if is_url(folder) else Path(folder)
    runs.check_holds_model(folder)
    integrity.check_model(folder)
    tokenizer = Tokenizer.from_folder(integrity.tokenizer_folder(folder))
    if runs.is_pretraining(folder):
        last, config, weights = read_run(folder, step, Console().warn)
        detects = architecture_of(weights) == BertForReplacedTokenDetection.__name__
        model = (BertForReplacedTokenDetection if detects else BertForPreTraining)(config)
        model.load_state_dict(weights)
        length = runs.trained_length(folder)
        check_tokenizer(tokenizer, folder)
        truncation = Truncation(length) if length else None
        return _checked_finite(
            LoadedModel(model, tokenizer, str(folder), truncation, revision=f"step {last}", trained_here=True)
        )
    if step is not None:
        raise UserError(f"step: found {step} with {folder}, which is one model, expected none; leave --step out")
    revision, folder = _revision(folder), runs.model_folder(folder)
    check_tokenizer(tokenizer, folder)
    saved = saved_class(folder).from_folder(folder)
    return _checked_finite(
        LoadedModel(
            saved,
            tokenizer,
            str(folder),
            load_truncation(folder, saved.config),
            load_settings(folder, Answering),
            columns_of(load_note(folder, COLUMNS)),
            load_vectors(folder),
            revision,
        )
    )


def _revision(folder: Path) -> str | None:
    """The commit of a hub model, for which its folder in the hub library's cache is named, or the step of a fine-tuning
    run; None for another folder.
    """
    if folder.parent.name == "snapshots":
        return folder.name
    results = folder / runs.RESULTS
    if not (results.is_file() and (folder / runs.MODEL / "config.json").is_file()):
        return None
    step = runs.read_fields(results).get("best_step")
    return None if step is None else f"step {step}"


def _check_step(step: object) -> None:
    """Raise UserError for a step that is not a whole number, "best" or None."""
    if step not in (None, "best") and (not isinstance(step, Integral) or isinstance(step, bool)):
        raise UserError(f"step: found {step!r}, expected a whole number, 'best', or None for the newest good one")


_Note = TypeVar("_Note", Answering, Truncation, Vectors)
_NOTES: dict[type, str] = {Answering: ANSWERING, Truncation: TRUNCATION, Vectors: VECTORS}


def load_settings(folder: Path, kind: type[_Note]) -> _Note | None:
    """The settings of one kind that a model was trained with, as saved in its config.json; None if they are not.

    Raises:
        UserError, ModelError: the entry does not fit.
    """
    name = _NOTES[kind]
    fields = load_note(folder, name)
    if fields is None:
        return None
    try:
        noted = kind(**fields)
    except TypeError as error:
        raise UserError(
            f"{folder / 'config.json'}: {name}: found {str(fields)[:60]} ({error}), expected the fields of "
            "a model that Cloze has trained; export it again"
        ) from error
    check_kinds(name, noted)
    return noted


def load_truncation(folder: Path, config: BertConfig) -> Truncation | None:
    """How a model's training texts were truncated: by its own note, else by sentence-transformers' files and the side
    that its tokenizer cuts; None: as many tokens as the model has positions, from the beginning.

    Raises:
        UserError, ModelError: a file is damaged, or an entry does not fit.
    """
    if noted := load_settings(folder, Truncation):
        return noted
    length, side = read_max_length(folder), read_tokenizer_config(folder).get("truncation_side")
    if length is None and side != "left":
        return None
    positions = config.max_position_embeddings
    return Truncation(min(length or positions, positions), "tail" if side == "left" else "head")


def cut_alike(folder: Path, notes: Fields) -> None:
    """Let the tokenizer in a new model's folder cut the side of texts that the model's training cut, for transformers.

    Args:
        notes: of the model's config.json. Nothing is changed without a note on truncation, or if it keeps both ends,
            which transformers does not.
    """
    path, keep = folder / "tokenizer_config.json", notes.get(TRUNCATION, {}).get("keep")
    if keep not in ("head", "tail") or not path.is_file():
        return
    side, values = "left" if keep == "tail" else "right", read_object(path)
    if values.get("truncation_side", "right") != side:
        text = json.dumps(values | {"truncation_side": side}, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")


def load_vectors(folder: Path) -> Vectors | None:
    """How a model's vectors are pooled, as `load_truncation`; of what is not computed here is warned."""
    return load_settings(folder, Vectors) or read_pooling(folder, Console().warn)


def _checked_finite(loaded: LoadedModel) -> LoadedModel:
    """Return the model after a test on an empty text, whose vectors are NaN if the weights are damaged.

    Raises:
        UserError: the vectors are not finite.
    """
    nothing = np.zeros(1, np.int64)
    sequence = assemble(np.empty(0, np.int64), [[(nothing, nothing)]], loaded.tokenizer.special_tokens)
    (inputs,) = concatenated(*sequence, np.array([1]), loaded.config.segments)
    with torch.inference_mode():
        encoder = getattr(loaded.model, "bert", loaded.model)
        vectors = encoder(**to_device(inputs, torch.device(loaded.device))).last_hidden_state
    if not vectors.isfinite().all():
        raise UserError(
            f"{loaded.source}: found a model whose vectors are not finite (NaN), expected numbers; its "
            "weights are damaged: take an earlier checkpoint, or fetch the model again"
        )
    return loaded


def read_run(
    run: Path, step: int | Literal["best"] | None, warn: Callable[[str], None]
) -> tuple[int, BertConfig, StateDict]:
    """Step, shape and weights of a pretraining run's checkpoint, as `read_run_weights`.

    Raises:
        UserError, ModelError: there is no such checkpoint, or its weights are damaged, of another shape or not finite.
    """
    last, weights = read_run_weights(run, step, warn)
    shape, said = runs.model_config(run), f"step {last} of {run}"
    check_sizes(shape, weights, said)
    check_finite(weights, said)
    return last, shape, weights


def read_run_weights(
    run: Path, step: int | Literal["best"] | None, warn: Callable[[str], None]
) -> tuple[int, StateDict]:
    """As `checkpoint.weights.read_weights`, for programs that have not prepared the environment for DeepSpeed."""
    with importing_deepspeed():
        from cloze.launch.checkpoint.weights import read_weights
    last, weights = read_weights(run, step, warn)
    return last, _of_model(weights)


def read_run_average(
    run: Path,
    count: int,
    step: int | Literal["best"] | None,
    warn: Callable[[str], None],
    *,
    part: str,
    ema: bool,
) -> tuple[list[int], StateDict]:
    """As `checkpoint.weights.read_average`, for programs that have not prepared the environment for DeepSpeed.

    Args:
        part: prefix of the parameters of a submodel, such as ELECTRA's generator.
    """
    with importing_deepspeed():
        from cloze.launch.checkpoint.weights import read_average
    steps, weights = read_average(run, count, step, warn, ema=ema)
    return steps, _of_model(
        {name.removeprefix(part): value for name, value in weights.items() if name.startswith(part)}
    )


def _of_model(weights: StateDict) -> StateDict:
    """The weights of BERT and its heads, without parameters that an objective added."""
    return {name: value for name, value in weights.items() if name.startswith(_PARTS)}
