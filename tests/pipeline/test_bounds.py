"""Bounds of fields: every field that has them refuses what is outside, and says so in its help."""

import math
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from cloze.launch.commands import COMMANDS
from cloze.launch.config import TrainConfig
from cloze.launch.config.training import BatchPhase, MaskingConfig, MaskingPhase
from cloze.launch.parsing.fields import describe
from cloze.pipeline.bounds import Bounds, bounds_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.references import load

# Values of required fields; of others a text.
VALUES = {"global_batch_size": 8, "until_tokens": 5, "rate": 0.5, "input": ["a"], "data": ["d"], "grid": ["seed=1,2"]}

# Items of lists, which their section checks.
CHECKED_BY = {
    BatchPhase: lambda phase: TrainConfig(batch_phases=[phase]),
    MaskingPhase: lambda phase: MaskingConfig(phases=[phase]),
}


def sections(kind) -> set[type]:
    """The dataclasses of a configuration: its own, its sections, and those of items of lists."""
    found = {kind}
    for hint in get_type_hints(kind).values():
        for part in (hint, *get_args(hint), *(item for member in get_args(hint) for item in get_args(member))):
            if is_dataclass(part) and part not in found:
                found |= sections(part)
    return found


def outside(bounds: Bounds) -> list[float]:
    lower = [bounds.at_least - 1] if bounds.at_least is not None else [bounds.above] if bounds.above is not None else []
    upper = [bounds.at_most + 1] if bounds.at_most is not None else [bounds.below] if bounds.below is not None else []
    return [*lower, *upper, math.nan]


def test_every_field_refuses_what_is_out_of_its_bounds_and_says_them_in_its_help():
    checked = 0
    for config in {load(command.config) for command in COMMANDS.values()}:
        described = describe(config)
        for kind in sections(config):
            required = {
                field.name: VALUES.get(field.name, "x")
                for field in fields(kind)
                if field.default is MISSING and field.default_factory is MISSING
            }
            for name, allowed in bounds_of(kind).items():
                for number in outside(allowed):
                    with pytest.raises(UserError, match=rf"{name}: found {number}, expected {allowed}"):
                        value = [number] if "list" in str(get_type_hints(kind)[name]) else number
                        item = kind(**required | {name: value})
                        CHECKED_BY[kind](item)
                checked += 1
            for name, allowed in bounds_of(config).items():
                assert described[name].sentence.endswith(f" {str(allowed).capitalize()}."), name
    assert checked > 100


def test_bounds_in_words():
    assert str(Bounds(at_least=0, at_most=1)) == "0 to 1" and str(Bounds(above=0)) == "above 0"
    assert str(Bounds(above=0, at_most=1)) == "above 0, up to 1"
    assert str(Bounds(at_least=0, below=1)) == "at least 0, below 1"
