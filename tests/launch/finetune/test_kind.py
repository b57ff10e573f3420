"""Each kind of task of the table: what it says of itself is there."""

import pytest

from cloze.launch.commands import COMMANDS
from cloze.launch.config import FinetuneConfig
from cloze.launch.finetune.kind import Kind
from cloze.launch.finetune.reading import _USUAL
from cloze.launch.finetune.tasks import KINDS, TASKS


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_reads_known_fields_has_a_task_and_is_predicted_by_a_command(name):
    kind = KINDS[name].load()
    assert isinstance(kind, Kind) and {*kind.fields} <= {*_USUAL}
    assert name in {task.kind for task in TASKS.values()}, "an entry of TASKS for each kind"
    for task in ("classification", "pair-classification"):
        config = FinetuneConfig(task, "model", "train", "validation", "run")
        assert " ".join(kind.next_command(config, TASKS[task]).split()[:2]) in COMMANDS


def test_each_field_that_only_some_kinds_read_is_read_by_one():
    assert {*_USUAL} == {field for entry in KINDS.values() for field in entry.load().fields}
