"""Steps, epochs and rates of fine-tuning, as its configuration resolves them."""

import pytest

from cloze.launch.finetune.tasks import find_task
from cloze.pipeline.errors import UserError
from tests.launch.finetune.running import config_of


def test_steps_of_warmup_are_compared_with_the_steps_that_epochs_make():
    config = config_of("--schedule.warmup_steps", "2000").for_task(find_task("sst2"), 512)
    assert config.for_units(32_000).train.max_steps == 3000
    with pytest.raises(UserError, match="schedule.warmup_steps: found 2000, expected at most train.max_steps = 300"):
        config.for_units(3200)


@pytest.mark.parametrize("steps", [0, 77, 500])
def test_evaluations_by_steps_win_over_epochs(steps):
    """500 is what pretraining has without an option."""
    counted = config_of("--evaluation.every_steps", str(steps)).for_units(32_000)
    assert counted.evaluation.every_steps == steps
    assert config_of("--evaluate_every_epochs", "0.5").for_units(32_000).evaluation.every_steps == 500
    with pytest.raises(UserError, match="evaluate_every_epochs: found null without evaluation.every_steps"):
        config_of("--evaluate_every_epochs", "null")


@pytest.mark.parametrize("steps", [77, 1000])
def test_steps_that_are_given_win_over_epochs(steps):
    assert config_of("--train.max_steps", str(steps)).for_units(32_000).train.max_steps == steps
    with pytest.raises(UserError, match="epochs: found null without train.max_steps"):
        config_of("--epochs", "null")
