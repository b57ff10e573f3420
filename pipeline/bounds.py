"""Bounds of a field's values: metadata of the field, from which its check and a sentence of its help come."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

from cloze.pipeline.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEY = "bounds"
MOST = (1 << 63) - 1
"""The largest whole number of any field: numpy and torch have 64 bits for one."""
MOST_COUNT = (1 << 62) - 1
"""The largest count of samples and steps: counts are added up to 64 bits."""


def whole_number(text: str) -> int | None:
    """The number that up to 18 digits from 0 to 9 are; None for another text. `str.isdigit` is also true of ² and of
    5,000 digits, which `int` does not take.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


@dataclass(frozen=True)
class Bounds:
    """The numbers that a field takes; None: no bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least} to {self.at_most}"
        words = {"at least": self.at_least, "above": self.above, "up to": self.at_most, "below": self.below}
        return ", ".join(f"{word} {number}" for word, number in words.items() if number is not None)

    def hold(self, value: float) -> bool:
        """Whether a value is within the bounds; one that is no number (NaN) is not."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def bounds(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> dict[str, Bounds]:
    """Metadata of a field of numbers, or of lists of them; null and names such as `auto` are not compared."""
    return {_KEY: Bounds(at_least, above, at_most, below)}


SHARE = bounds(at_least=0, at_most=1)
POSITIVE_SHARE = bounds(above=0, at_most=1)
MOST_SECONDS = 1 << 30
"""34 years: the system's clocks and waits raise errors some way above."""
MOST_PROCESSES = 1024
"""On one machine."""
SEED = bounds(at_least=0, at_most=MOST)  # torch's generators take signed 64-bit integers


def bounds_of(config: type[DataclassInstance]) -> dict[str, Bounds]:
    """The bounds of a dataclass's own fields, by name; a field that a subclass declares anew keeps those it has."""
    kinds = [kind for kind in reversed(config.__mro__) if is_dataclass(kind)]
    return {field.name: field.metadata[_KEY] for kind in kinds for field in fields(kind) if _KEY in field.metadata}


def check_bounds(section: str, config: DataclassInstance) -> None:
    """Raise UserError for the first field whose value is out of its bounds, or a whole number of more than 64 bits.

    Args:
        section: of the fields, for the message; empty for a command's own.
    """
    of_fields = bounds_of(type(config))
    for field in fields(config):
        value, allowed = getattr(config, field.name), of_fields.get(field.name)
        for number in value if isinstance(value, (list, tuple)) else [value]:
            found = f"{f'{section}.' * bool(section)}{field.name}: found {number!s:.60}"
            if isinstance(number, (int, float)) and allowed and not allowed.hold(number):
                raise UserError(f"{found}, expected {allowed}")
            if isinstance(number, int) and abs(number) > MOST:
                raise UserError(f"{found}, expected at most {MOST}")
