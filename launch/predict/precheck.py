"""Checks that the model and the files given to `cloze predict` exist, before torch is imported."""

import re
from dataclasses import fields
from typing import Any

from cloze.launch.config.model import ModelConfig
from cloze.launch.parsing import chunks, value_of
from cloze.launch.predict.config import Input
from cloze.launch.predict.rows import check_file
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.pretrained.precheck import check_tokenizer, check_used
from cloze.launch.system.pictures import check_library
from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import load_yaml

_WORD = re.compile(r"[a-z]+(-[a-z]+)*")  # what an operation is called


def check_inputs(config: Input) -> None:
    """Raise UserError for a missing model or file of texts, or a picture without matplotlib."""
    check_used(config)
    check_file(config)
    for name in ("attention", "picture"):
        if getattr(config, name, None):
            check_library(name)


def check_tokenizing(config: Input) -> None:
    """Raise UserError for a missing tokenizer or file of texts."""
    check_tokenizer(config)
    check_file(config)


def check_words(words: list[str]) -> None:
    """Raise UserError for words that name no model, or a missing one: the first of them may have been meant for an
    operation.
    """
    model = named_model(words)
    try:
        check_used(model)
    except UserError as error:
        if not _WORD.fullmatch(model.model):
            raise
        operations = ", ".join(name for name, entry in OPERATIONS.items() if entry.command)
        served = "; this one has `cloze serve` and Python only" if model.model in OPERATIONS else ""
        raise UserError(
            f"cloze predict: found {model.model!r}, expected an operation ({operations}{served}) or a model; read as "
            f"the name of a model: {error}"
        ) from error


def named_model(words: list[str]) -> ModelConfig:
    """The model named by words of the command line; other errors in the words are left to the parser.

    Args:
        words: words after `predict`: the model, texts, options.

    Raises:
        UserError: they name no model.
    """
    given = list(chunks(words))
    named = [word for option, chunk in given if not option for word in chunk if word != "--"]
    if not named:
        raise UserError(
            "cloze predict: found no model, expected its folder or name behind `predict`, or an operation: "
            "see cloze predict --help"
        )
    options = {field.name for field in fields(ModelConfig)} - {"model"}
    values: dict[str, Any] = {
        name: load_yaml(value_of(chunk) or "null", name=f"--{name}") for name, chunk in given if name in options
    }
    return ModelConfig(named[0], **values)
