"""Steps whose outcome comes late: what a checkpoint would hold meanwhile, and when a run is given up."""

import torch

from cloze.launch.checkpoint import TrainState
from cloze.launch.training.outcomes import Outcomes


class Known:
    """An outcome that is here."""

    def __init__(self, skipped: bool) -> None:
        self.skipped = float(skipped)

    def take(self) -> list[float]:
        return [self.skipped]


def outcomes(keeps_skipped: bool = False, most_skipped: int = 3) -> tuple[Outcomes, list[str]]:
    told: list[str] = []
    made = Outcomes(
        1,
        torch.device("cpu"),
        most_skipped=most_skipped,
        keeps_skipped=keeps_skipped,
        on_skip=lambda step: told.append(str(step)),
    )
    made.begin(TrainState())
    return made, told


def step(made: Outcomes, number: int, skipped: bool) -> TrainState:
    state = TrainState(step=number, samples_consumed=8 * number)
    made.window += 1
    made.add(Known(skipped), state, 8 * (number - 1))
    return state


def test_a_checkpoint_holds_the_last_good_step_with_its_own_sums():
    made, told = outcomes()
    step(made, 1, False)
    state = step(made, 2, True)
    state, failed = made.look(state)
    assert failed is None and made.skipped_in_a_row == 1 and state.skipped_steps == 1
    good, window = made.good
    assert good.step == 1 and window.tolist() == [1.0] and made.window.tolist() == [2.0]
    assert told == ["step 2, on samples 8 to 15 of the stream (epoch 0)"]


def test_the_newest_step_is_left_until_later_and_a_good_one_ends_the_row():
    made, _ = outcomes()
    state = step(made, 1, True)
    state, _ = made.look(state, leave=1)
    assert made.good[0].step == 0 and state.skipped_steps == 0, "not looked at yet"
    state = step(made, 2, False)
    state, _ = made.look(state)
    assert made.skipped_in_a_row == 0 and made.good[0].step == 2 and made.good[0].skipped_steps == 1


def test_in_fp16_a_skipped_step_is_kept_for_its_loss_scale():
    made, _ = outcomes(keeps_skipped=True)
    made.look(step(made, 1, True))
    assert made.good[0].step == 1


def test_too_many_in_a_row_are_looked_at_to_the_last():
    """The steps behind them too: if they were good they are in the weights, and so in the checkpoint."""
    made, _ = outcomes(most_skipped=2)
    for number, skipped in enumerate((True, True, False), 1):
        state = step(made, number, skipped)
    state, failed = made.look(state, leave=1)
    assert failed is not None and failed.state.step == 2
    assert made.good[0].step == 3 and state.skipped_steps == 2


def test_a_state_that_changes_between_steps_is_kept_only_behind_a_good_one():
    made, _ = outcomes()
    state, _ = made.look(step(made, 1, False))
    made.changed(TrainState(step=1, evaluated_step=1))
    assert made.good[0].evaluated_step == 1
    state, _ = made.look(step(made, 2, True))
    made.changed(TrainState(step=2, evaluated_step=2))
    assert made.good[0].evaluated_step == 1
