"""Bounds of fields in words and against values; tests/launch/config/test_config.py has all fields."""

import math
from dataclasses import dataclass, field

import pytest

from cloze.pipeline.bounds import SHARE, Bounds, bounds, bounds_of, check_bounds
from cloze.pipeline.errors import UserError


@dataclass
class Section:
    share: float | None = field(default=0.5, metadata={"mark": 1} | SHARE)
    sizes: list[int] = field(default_factory=list, metadata=bounds(above=0))


@dataclass
class Narrower(Section):
    share: float | None = 0.25


def test_what_is_out_of_bounds_is_named():
    for values in ({"share": 0}, {"share": 1.0}, {"share": None}, {"sizes": [1, 2]}):
        check_bounds("section", Section(**values))
    with pytest.raises(UserError, match=r"^section.share: found 1.5, expected 0 to 1$"):
        check_bounds("section", Narrower(1.5))  # a field that is declared anew keeps its bounds
    with pytest.raises(UserError, match="^share: found nan, expected 0 to 1$"):
        check_bounds("", Section(math.nan))
    with pytest.raises(UserError, match="^section.sizes: found 0, expected above 0$"):
        check_bounds("section", Section(sizes=[3, 0]))
    assert bounds_of(Narrower) == {"share": Bounds(at_least=0, at_most=1), "sizes": Bounds(above=0)}


def test_bounds_in_words():
    assert str(Bounds(at_least=0, at_most=1)) == "0 to 1" and str(Bounds(above=0)) == "above 0"
    assert str(Bounds(above=0, at_most=1)) == "above 0, up to 1"
    assert str(Bounds(at_least=0, below=1)) == "at least 0, below 1"
