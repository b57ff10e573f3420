"""The tables that name classes by `module:name`: each name is there, and a table is read without what it names."""

import subprocess
import sys

import pytest

from cloze.launch.predict.config import Input
from cloze.launch.predict.operation import Operation
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.pipeline.references import load


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_of_the_table_is_there(name):
    assert issubclass(OBJECTIVES[name].load(), Objective)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_the_table_has_its_name_and_a_command_of_its_options(name):
    entry = OPERATIONS[name]
    operation = entry.load()
    assert issubclass(operation, Operation), f"OPERATIONS: {name} names {operation}, expected an Operation"
    assert operation.name == name, f"OPERATIONS: {name} names an operation whose `name` is {operation.name}"
    if entry.command:
        missing = {operation, Input} - {*load(entry.command).__mro__}
        assert not missing, f"OPERATIONS: the command of {name}, {entry.command}, is no subclass of {missing}"


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="absent"):
        load("cloze.pipeline.references:absent")


@pytest.mark.parametrize("table", ["launch.pretrain.objectives.table", "launch.predict.table", "pipeline.formats"])
def test_a_table_is_read_without_what_it_names(table):
    code = f"import sys, cloze.{table}; assert not {{'torch', 'numpy', 'pyarrow'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
