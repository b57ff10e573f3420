"""Each kind of task of the table: what it says of itself is there."""

import pytest

from cloze.launch.commands import COMMANDS
from cloze.launch.config import FinetuneConfig
from cloze.launch.finetune.job import _USUAL
from cloze.launch.finetune.kind import Kind
from cloze.launch.finetune.tasks import KINDS, TASKS
from tests.tables import assert_same_names


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_reads_known_fields_has_a_task_and_is_predicted_by_a_command(name):
    kind = KINDS[name].load()
    assert isinstance(kind, Kind), f"KINDS in launch/finetune/tasks.py: {name} names {kind!r}, expected a Kind"
    unknown = {*kind.fields} - {*_USUAL}
    assert not unknown, f"_USUAL in launch/finetune/job.py has no default of {unknown}, fields of the kind {name}"
    of_tasks = {task.kind for task in TASKS.values()}
    assert name in of_tasks, f"TASKS in launch/finetune/tasks.py has no task of the kind {name}"
    for task in ("classification", "pair-classification"):
        config = FinetuneConfig(task, "model", "train", "validation", "run")
        command = " ".join(kind.next_command(config, TASKS[task]).split()[:2])
        assert command in COMMANDS, f"{name}: its next command {command!r} is none of launch/commands.py"


def test_each_field_that_only_some_kinds_read_is_read_by_one():
    read = {field for entry in KINDS.values() for field in entry.load().fields}
    assert_same_names(_USUAL, read, "`fields` of the kinds in launch/finetune/examples")
