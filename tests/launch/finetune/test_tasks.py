"""The table of tasks: each is of a kind of the table beside it, and a slip is answered with the nearest one."""

import pytest

from cloze.launch.config.metrics import MEASURES
from cloze.launch.finetune.tasks import KINDS, TASKS, find_task
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_of_a_known_kind_with_known_metrics(name):
    task = find_task(name)
    assert task.kind in KINDS and task.metrics and {*task.metrics} <= MEASURES.keys()


def test_a_slip_is_answered_with_the_nearest_task():
    with pytest.raises(UserError, match=r"task: found 'clasification', expected .*; did you mean classification\?"):
        find_task("clasification")
