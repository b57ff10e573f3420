"""The table of commands."""

import shlex

import pytest

from cloze.launch.commands import COMMANDS, explain, parse


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name):
    assert COMMANDS[name].examples
    for example in COMMANDS[name].examples:
        assert example in explain(name)
        words = shlex.split(example.partition(" > ")[0])
        begin = words.index("cloze") + 1
        assert " ".join(words[begin : begin + len(name.split())]) == name
        parse(name, words[begin + len(name.split()) :])
