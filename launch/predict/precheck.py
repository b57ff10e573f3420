"""Checks that the model and the files given to `cloze predict` exist, before torch is imported."""

from __future__ import annotations

from dataclasses import fields

import yaml

from cloze.launch.config.model import ModelConfig
from cloze.launch.parsing import words_first
from cloze.launch.predict.config import Input
from cloze.launch.predict.rows import check_file
from cloze.launch.pretrained.precheck import check_used
from cloze.pipeline.errors import UserError


def check_inputs(config: Input) -> None:
    """Raise UserError for a model or a file of texts that is not there."""
    check_used(config)
    check_file(config)


def check_words(words: list[str]) -> None:
    """Raise UserError for words that name no model, or one that is not there."""
    check_used(named_model(words))


def named_model(words: list[str]) -> ModelConfig:
    """Which model words of the command line name, and where it comes from; what is wrong in the options is said by who
    parses them all.

    Args:
        words: behind `predict`: the model, texts, options.

    Raises:
        UserError: there is no model among them.
    """
    ordered = words_first(words)
    if not ordered or ordered[0].startswith("--"):
        raise UserError("cloze predict: found no model, expected its folder or name behind `predict`, or an operation: "
                        "see cloze predict --help")
    found = {}
    for number, word in enumerate(ordered):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in {field.name for field in fields(ModelConfig)} - {"model"}:
            given = value if equals else ordered[number + 1] if number + 1 < len(ordered) else "null"
            found[name] = yaml.safe_load(given)
    return ModelConfig(ordered[0], **found)
