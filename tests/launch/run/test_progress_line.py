"""Lines of progress: which values stand in them, and in which order."""

import pytest

from cloze.launch.finetune.tasks import TASKS
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.launch.run.progress_line import ProgressLine, has_progress
from cloze.launch.system.console import Console


def line(capsys, **scalars: float) -> list[str]:
    ProgressLine(Console()).show(1, None, {name.replace("__", "/"): value for name, value in scalars.items()})
    return capsys.readouterr().out.split("  ")[1:]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_of_each_term_of_an_objective_is_shown(capsys, objective):
    terms = OBJECTIVES[objective].load().TERMS
    shown = line(capsys, **{f"train__{term}_loss": float(number) for number, term in enumerate(terms)})
    assert [part.split()[-1].rstrip() for part in shown] == [f"{number}.0000" for number in range(len(terms))]


@pytest.mark.parametrize("task", TASKS)
def test_the_metric_that_selects_a_tasks_best_checkpoint_is_shown(task):
    for name in TASKS[task].metrics:
        assert has_progress({f"validation/{name}": 0.5}), f"{name} of {task}: launch/run/progress_line.py hides it"


def test_of_what_says_the_same_one_is_shown(capsys):
    values = {"mlm_loss": 2, "mlm_accuracy": 0.5, "mlm_perplexity": 7, "next_sentence_loss": 1, "ema_loss": 2}
    values |= {"loss": 3, "accuracy_topic": 0.4, "accuracy_mean": 0.3, "HasAns_f1": 1, "total": 9, "loss/wiki": 6}
    shown = line(capsys, **{f"validation__{name}": value for name, value in values.items()}, train__loss=4)
    assert [part.rstrip() for part in shown] == [
        "loss 4.0000",
        "validation loss 3.0000",
        "mlm 2.0000",
        "mlm accuracy 0.5000",
        "nsp 1.0000",
        "accuracy mean 0.3000",
        "wiki 6.0000",
    ]
