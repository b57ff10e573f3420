"""Fields in words."""

from cloze.launch.parsing.fields import describe, in_words
from tests.launch.parsing.test_help_pages import config_of


def test_kinds_of_values_in_words():
    assert in_words(int | None) == "a whole number" and in_words(list[float]).startswith("a list of numbers")
    assert in_words(describe(config_of("pretrain"))["zero.stage"].kind) == "one of: 0, 1, 2, 3"
