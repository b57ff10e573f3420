"""The first broken rule is named; what a library says of its errors is shortened to a line."""

import pytest

from cloze.pipeline.errors import UserError, did_you_mean, on_one_line, reason_of, refuse


def test_the_first_rule_whose_condition_is_true_is_named():
    refuse()
    refuse((False, "a: found 1"), (None, "b: found 2"), ([], "c: found 3"))
    with pytest.raises(UserError, match="^b: found 2, expected 1$"):
        refuse((0, "a: found 1"), ([0], "b: found 2, expected 1"), (True, "c: found 3"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("\n  no space left\n at a.cpp:7"), "no space left"),
        (RuntimeError("\n"), "RuntimeError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_the_reason_of_an_error_is_one_line(error, line):
    assert reason_of(error) == line


def test_all_of_an_error_is_put_on_one_line():
    assert on_one_line(RuntimeError("\n  no space\n left ")) == "no space left"
    assert on_one_line(RuntimeError("\n")) == "RuntimeError"


def test_the_known_word_that_is_most_like_an_unknown_one_is_proposed():
    assert did_you_mean("trian", ["plan", "train"]) == "; did you mean train?"
    assert did_you_mean("xyz", ["plan", "train"]) == ""
