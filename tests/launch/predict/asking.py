"""Asking models by command, by Python and by the pipelines of transformers."""

import json

import pytest
import transformers

from cloze.launch.cli import main
from cloze.pipeline.errors import UserError

TEXTS = [
    "the cat sat on the mat .",
    "Walking to New newyork, the man bought milk!",
    "Who ate  an apple?",
    "é unknownword playing wab",
    "a",
    "the sky is blue and the sea is blue " * 4,
]


def lines(capsys, *arguments) -> list[dict]:
    """What a command prints as JSON, one object a line."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def pipe(task: str, folder, **options):
    return transformers.pipeline(task, model=str(folder), tokenizer=str(folder), **options)


def said_by(call) -> str:
    """The one line of the error that a call raises."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
