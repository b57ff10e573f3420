"""Checks of arguments given from Python, which no command line parser has checked."""

import dataclasses
import os
from numbers import Integral
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cloze.pipeline.errors import UserError

_NAMES = {int: "a whole number", str: "text", NoneType: "None"}


def check_options(options: object) -> None:
    """Raise UserError for the first field of a dataclass whose value is not of the declared type, or not one of its
    names.
    """
    for name, kinds in _kinds(type(options)).items():
        value = getattr(options, name)
        if not any(_is_of(value, kind) for kind in kinds):
            expected = [
                f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else _NAMES.get(kind) or str(kind)
                for kind in kinds
            ]
            raise UserError(f"{name}: found {shown(value)}, expected {' or '.join(expected)}")


def _kinds(options: type) -> dict[str, tuple[Any, ...]]:
    """Types of values that each field may have."""
    hints = get_type_hints(options)
    return {
        field.name: get_args(hints[field.name])
        if get_origin(hints[field.name]) in (Union, UnionType)
        else (hints[field.name],)
        for field in dataclasses.fields(options)
    }


def _is_of(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is int:  # numpy's integers count as whole numbers
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def model_name(model: object) -> str:
    """The path, URL or name of a model as text, with ~ replaced by the home folder.

    Raises:
        UserError: it is empty, or neither text nor path.
    """
    if not isinstance(model, str | os.PathLike) or not str(model).strip():
        raise UserError(
            f"model: found {shown(model)}, expected the folder of a Cloze run or a Hugging Face folder, or "
            "the name of a hub model"
        )
    text = str(model)
    return str(Path(text).expanduser()) if text.startswith("~") else text


def shown(value: object) -> str:
    """A value as one short line."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= 60 else text[:57] + "..."
