"""The tables that name classes by `module:name`: each name is there, and a table is read without what it names."""

import subprocess
import sys

import pytest

from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.launch.system.references import load


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_of_the_table_is_there(name):
    assert issubclass(OBJECTIVES[name].load(), Objective)


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="absent"):
        load("cloze.launch.system.references:absent")


def test_a_table_is_read_without_torch():
    code = "import sys, cloze.launch.pretrain.objectives.table as t; assert t.OBJECTIVES and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
