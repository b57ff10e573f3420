"""Values of different sections that contradict each other."""

import pytest

from cloze.launch.commands import parse
from cloze.launch.config import PretrainConfig
from cloze.pipeline.errors import UserError

BASE = PretrainConfig(data="d", output="o")


def test_compiled_layers_are_refused_where_weights_move():
    with pytest.raises(UserError, match="train.compile: found true at zero.stage 3, expected stage 0 to 2"):
        parse("pretrain", ["--data", "d", "--output", "o", "--train.compile", "true", "--zero.stage", "3"])
