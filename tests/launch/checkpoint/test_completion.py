"""Which evaluation is the best one, and when a run is complete: by pure functions, and in a run that stops early."""

from types import SimpleNamespace

import pytest
import torch

from cloze.launch.checkpoint.completion import completion, evaluated
from cloze.launch.checkpoint.folder import CheckpointFolder
from cloze.launch.checkpoint.state import TrainState, read_state
from cloze.launch.checkpoint.weights import read_weights
from cloze.launch.config import EvaluationConfig, TrainConfig
from cloze.pipeline.errors import UserError
from tests.launching import curve, train
from tests.synthetic import make_shards

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


def after(config: EvaluationConfig, *values: float) -> TrainState:
    state = TrainState()
    for number, value in enumerate(values, 1):
        state = evaluated(
            config,
            TrainState(**{**vars(state), "step": number * 10, "evaluated_step": number * 10}),
            {f"validation/{config.metric}": value},
            number * 10,
        )
    return state


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("mlm_loss", (5.0, 4.0, 4.5), (20, 4.0, 1)),
        ("mlm_perplexity", (50.0, 60.0, 55.0), (10, 50.0, 2)),
        ("mean_squared_error", (2.0, 1.5, 1.7), (20, 1.5, 1)),
        ("mlm_accuracy", (0.1, 0.3, 0.3), (20, 0.3, 1)),
        ("mlm_loss", (float("nan"), 4.0, float("nan")), (20, 4.0, 1)),
    ],
)
def test_less_is_better_for_losses_and_more_for_the_rest(metric, values, best):
    state = after(EvaluationConfig(metric=metric), *values)
    assert (state.best_step, state.best_value, state.evaluations_since_best) == best


def test_the_best_by_another_metric_counts_for_nothing():
    """The run was begun with the default metric, a loss of 6.9, which is no accuracy."""
    state = after(EvaluationConfig(), 6.9)
    changed = EvaluationConfig(metric="mlm_accuracy", target=0.72, patience=1)
    state = evaluated(changed, state, {"validation/mlm_accuracy": 0.1}, 20)
    assert (state.best_step, state.best_value) == (20, 0.1)


def test_a_metric_that_is_not_measured():
    with pytest.raises(UserError, match="found 'accuracy', expected one of .*mlm_accuracy"):
        evaluated(EvaluationConfig(metric="accuracy"), TrainState(), {"validation/mlm_accuracy": 0.5}, 0)


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_patience_ends_the_run(tmp_path):
    """A rate that soon does harm: the best evaluation is an early one, which two newest checkpoints do not cover."""
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    arguments = (
        "--train.max_steps",
        "200",
        "--train.learning_rate",
        "0.05",
        "--evaluation.every_steps",
        "3",
        "--evaluation.keep_best",
        "true",
        "--evaluation.patience",
        "6",
        "--evaluation.metric",
        "mlm_loss",
        "--checkpoint.every_steps",
        "2",
        "--checkpoint.keep_last",
        "1",
    )
    output = train(data, run, *arguments, processes=2)
    assert "not better in 6 evaluations since" in output
    losses = {line["step"]: line["validation/mlm_loss"] for line in curve(run) if "validation/mlm_loss" in line}
    best = min(losses, key=losses.get)
    last = max(losses)
    assert 0 < best < last and last == best + 18, losses
    checkpoints = CheckpointFolder(run / "checkpoints", print)
    assert checkpoints.steps() == [best, last]
    state = read_state(run / "checkpoints" / f"step-{last:08d}")
    assert (state["best_step"], state["best_value"]) == (best, losses[best])
    best_weights, newest = read_weights(run, "best", print), read_weights(run, None, print)
    assert (best_weights[0], newest[0]) == (best, last)
    assert not torch.equal(best_weights[1]["bert.embeddings.word.weight"], newest[1]["bert.embeddings.word.weight"])
    again = train(data, run, *arguments, processes=2)
    assert f"complete at step {last}" in again and max(line["step"] for line in curve(run)) == last
