"""The table of tasks: each is of a kind of the table beside it, and a slip is answered with the nearest one."""

import pytest

from cloze.launch.config.metrics import MEASURES
from cloze.launch.finetune.tasks import KINDS, TASKS, find_task
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_of_a_known_kind_with_known_metrics(name):
    task = find_task(name)
    assert task.kind in KINDS, f"KINDS in launch/finetune/tasks.py has no entry {task.kind}, the kind of {name}"
    assert task.metrics, f"TASKS in launch/finetune/tasks.py: {name} has no metric, expected the deciding one first"
    unknown = {*task.metrics} - MEASURES.keys()
    assert not unknown, f"MEASURES in launch/config/metrics.py has no entry for {unknown}, metrics of {name}"


def test_a_slip_is_answered_with_the_nearest_task():
    with pytest.raises(UserError, match=r"task: found 'clasification', expected .*; did you mean classification\?"):
        find_task("clasification")
