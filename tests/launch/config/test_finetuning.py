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
def test_evaluations_are_counted_in_steps_or_in_epochs(steps):
    """500 is what pretraining has without an option."""
    by_steps = "--evaluation.every_steps", str(steps)
    assert config_of(*by_steps).for_units(32_000).evaluation.every_steps == steps
    assert config_of("--evaluate_every_epochs", "0.5").for_units(32_000).evaluation.every_steps == 500
    assert config_of().for_units(32_000).evaluation.every_steps == 1000
    with pytest.raises(UserError, match=f"evaluation.every_steps: found {steps} beside evaluate_every_epochs 1, expec"):
        config_of(*by_steps, "--evaluate_every_epochs", "1")


def test_epochs_on_the_command_line_are_not_ignored_beside_a_file_that_counts_steps():
    with pytest.raises(UserError, match="every_steps: found 0 beside .* add --evaluation.every_steps null"):
        config_of("--config", "small-models", "--evaluate_every_epochs", "1")
    words = "--config", "small-models", "--evaluate_every_epochs", "2", "--evaluation.every_steps", "null"
    assert config_of(*words).for_units(320).evaluation.every_steps == 20


@pytest.mark.parametrize("steps", [77, 1000])
def test_steps_that_are_given_win_over_epochs(steps):
    assert config_of("--train.max_steps", str(steps)).for_units(32_000).train.max_steps == steps
    with pytest.raises(UserError, match="epochs: found null without train.max_steps"):
        config_of("--epochs", "null")
