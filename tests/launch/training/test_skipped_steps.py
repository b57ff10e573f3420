"""Steps whose outcome comes late: what a checkpoint would hold meanwhile, and when a run is given up."""

import pytest
import torch

from cloze.launch.checkpoint.state import TrainState
from cloze.launch.training.metric_sums import MetricWindow
from cloze.launch.training.skipped_steps import SkippedTooOften, TrainProgress


class Known:
    """An outcome that is here."""

    def __init__(self, skipped: bool) -> None:
        self.skipped = float(skipped)

    def take(self) -> list[float]:
        return [self.skipped]


def begun(keeps_skipped: bool = False, most_skipped: int = 3) -> tuple[TrainProgress, list[str]]:
    """A run before its first step, and its warnings of skipped steps."""
    told: list[str] = []
    progress = TrainProgress(
        MetricWindow(1, 0, torch.device("cpu")),
        most_skipped=most_skipped,
        keeps_skipped=keeps_skipped,
        warn=told.append,
    )
    return progress, told


def step(progress: TrainProgress, number: int, skipped: bool) -> None:
    progress.window.values += 1
    progress.add(Known(skipped), TrainState(step=number, samples_consumed=8 * number), 8 * (number - 1))


def test_a_checkpoint_holds_the_last_good_step_with_its_own_sums():
    progress, told = begun()
    step(progress, 1, False)
    step(progress, 2, True)
    progress.settle()
    assert progress.skipped_in_a_row == 1 and progress.state.skipped_steps == 1
    good, window = progress.good
    assert good.step == 1 and window[0] == 1.0 and progress.window.values[0] == 2.0
    (line,) = told
    assert "step 2, on samples 8 to 15 of the stream (epoch 0) are infinite or NaN" in line


def test_the_newest_step_is_left_until_later_and_a_good_one_ends_the_row():
    progress, _ = begun()
    step(progress, 1, True)
    progress.settle(leave=1)
    assert progress.good[0].step == 0 and progress.state.skipped_steps == 0, "not looked at yet"
    step(progress, 2, False)
    progress.settle()
    assert progress.skipped_in_a_row == 0 and progress.good[0].step == 2
    assert progress.good[0].skipped_steps == progress.state.skipped_steps == 1


def test_in_fp16_a_skipped_step_is_kept_for_its_loss_scale():
    progress, _ = begun(keeps_skipped=True)
    step(progress, 1, True)
    progress.settle()
    assert progress.good[0].step == 1


def test_too_many_in_a_row_are_looked_at_to_the_last():
    """The steps behind them too: if they were good they are in the weights, and so in the checkpoint."""
    progress, _ = begun(most_skipped=2)
    for number, skipped in enumerate((True, True, False), 1):
        step(progress, number, skipped)
    with pytest.raises(SkippedTooOften) as failed:
        progress.settle(leave=1)
    assert failed.value.step.state.step == 2
    assert progress.good[0].step == 3 and progress.state.skipped_steps == 2


def test_a_state_that_changes_between_steps_is_kept_only_behind_a_good_one():
    progress, _ = begun()
    step(progress, 1, False)
    progress.settle()
    progress.changed(TrainState(step=1, evaluated_step=1))
    assert progress.good[0].evaluated_step == 1
    step(progress, 2, True)
    progress.settle()
    progress.changed(TrainState(step=2, evaluated_step=2))
    assert progress.good[0].evaluated_step == 1
