"""What a library says of its errors is shortened to a line; the nearest known word is proposed."""

import pytest

from cloze.pipeline.errors import did_you_mean, on_one_line, reason_of


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
