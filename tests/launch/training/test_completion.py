"""When a run is complete: by its target, patience, steps or time budget."""

from types import SimpleNamespace

from cloze.launch.checkpoint import TrainState
from cloze.launch.config import EvaluationConfig, TrainConfig
from cloze.launch.training.completion import completion

TRAIN = TrainConfig(max_steps=1000)


def reason(evaluation: EvaluationConfig, metric: str, best: float, since: int) -> str | None:
    """Why a run is complete whose best evaluation is that of step 20, `since` evaluations ago."""
    state = TrainState(best_metric=metric, best_step=20, best_value=best, evaluations_since_best=since)
    return completion(SimpleNamespace(train=TRAIN, evaluation=evaluation), state)


def test_a_run_is_complete_by_target_or_patience():
    accuracy = EvaluationConfig(metric="mlm_accuracy", target=0.72)
    assert reason(accuracy, "mlm_accuracy", 0.71, 0) is None
    reached = "mlm_accuracy is 0.7200 at step 20: the target of 0.72 is reached"
    assert reason(accuracy, "mlm_accuracy", 0.72, 0) == reached
    loss = EvaluationConfig(metric="loss", target=2.0, patience=2)
    assert reason(loss, "loss", 2.4, 1) is None
    assert "not better in 2 evaluations" in reason(loss, "loss", 2.4, 2)
    assert "target of 2.0" in reason(loss, "loss", 1.9, 0)
    # The run was begun with the default metric, a loss of 6.9, which is no accuracy.
    assert reason(EvaluationConfig(metric="mlm_accuracy", target=0.72, patience=1), "loss", 6.9, 5) is None


def test_a_run_is_complete_by_steps_or_time():
    usual = EvaluationConfig()
    steps = SimpleNamespace(train=TRAIN, evaluation=usual)
    assert completion(steps, TrainState(step=999)) is None
    assert "all 1000 steps" in completion(steps, TrainState(step=1000))
    hours = SimpleNamespace(train=TrainConfig(time_budget_hours=2.0), evaluation=usual)
    assert completion(hours, TrainState(seconds=7199.0)) is None
    assert "budget of 2 hours is used up" in completion(hours, TrainState(seconds=7200.0))
