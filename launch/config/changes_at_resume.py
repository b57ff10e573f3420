"""Whether a run may be resumed with another value of a field: metadata of the field.

A field without a mark shapes the result: a run can resume with another value only with `checkpoint.accept_changes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Final, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEY = "in_a_run"
FREE: Final = {_KEY: "free"}  # does not change the result: a run may resume with another value
FIXED: Final = {_KEY: "fixed"}  # determines shapes of weights or states: no run can resume with another value


def marked(config: type[DataclassInstance], mark: dict[str, str]) -> list[str]:
    """Dotted names of the marked fields of a dataclass and its sections; `section.` for a section that is marked as a
    whole.
    """
    return list(_marked(config, mark, ""))


def _marked(config: type[DataclassInstance], mark: dict[str, str], prefix: str) -> Iterator[str]:
    kinds = get_type_hints(config)
    for field in fields(config):
        section = is_dataclass(kinds[field.name])
        if field.metadata.get(_KEY) == mark[_KEY]:
            yield f"{prefix}{field.name}{'.' * section}"
        elif section and _KEY not in field.metadata:
            yield from _marked(kinds[field.name], mark, f"{prefix}{field.name}.")
