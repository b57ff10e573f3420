"""A run that the command line makes shorter than its recipe does."""

import pytest
import yaml

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import ScheduleConfig
from cloze.launch.training.schedules import describe, multiplier
from cloze.pipeline.errors import UserError

PLACES = ("--data", "d", "--output", "o")


def warmup(command: str, *words: str) -> int:
    config = parse(command, [*PLACES, *words])
    return config.schedule.warmup_in(config.train.max_steps)


def test_the_recipes_warmup_shrinks_with_a_shorter_run(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("train: {max_steps: 200}\nschedule: {warmup_steps: 20}\n")
    for recipe in ("tiny", str(own)):  # 20 of 200 steps
        assert warmup("pretrain", "--config", recipe) == 20
        assert warmup("pretrain", "--config", recipe, "--train.max_steps", "50") == 5
        assert warmup("pretrain", "--train.max_steps=5", "--config", recipe) == 0
        assert warmup("pretrain", "--config", recipe, "--train.max_steps", "400") == 20, "a longer run keeps it"
    config = parse("pretrain", [*PLACES, "--config", "tiny", "--train.max_steps", "50"])
    assert multiplier(config.schedule, 5, 50) == 1.0 and multiplier(config.schedule, 4, 50) == 0.8
    assert describe(config.schedule, config.train) == (
        "linear, 5 steps of warmup, shrunk from 20 with the run, from 200 steps"
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"train": {"max_steps": 50}, "schedule": vars(config.schedule)}))
    assert warmup("pretrain", "--config", str(tmp_path / "run.yaml")) == 5, "a run's own configuration repeats it"
    assert warmup("pretrain", "--config", str(tmp_path / "run.yaml"), "--train.max_steps", "20") == 2
    assert warmup("sweep", "--config", "tiny", "--train.max_steps", "50", "--grid", "seed=1,2") == 5


def test_a_warmup_on_the_command_line_is_meant():
    assert warmup("pretrain", "--config", "tiny", "--train.max_steps", "50", "--schedule.warmup_steps", "20") == 20
    with pytest.raises(UserError, match="schedule.warmup_steps: found 20, expected at most train.max_steps = 5"):
        warmup("pretrain", "--config", "tiny", "--train.max_steps", "5", "--schedule.warmup_steps", "20")
    with pytest.raises(UserError, match="schedule.warmup_steps: found 9, expected at most train.max_steps = 5"):
        warmup("pretrain", "--config", "{train: {max_steps: 5}, schedule: {warmup_steps: 9}}")  # a recipe's own mistake


def test_print_config_shows_it_without_data_and_output(capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "--config", "tiny", "--train.max_steps", "5", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["schedule"]["warmup_of_steps"] == 200


def test_tokens_of_a_plan_and_steps_of_a_fine_tuning_shorten_too():
    words = ["--config", "tiny", "--train.sequence_length", "64", "--tokens", "1e4"]
    assert parse("plan", words).schedule.warmup_of_steps == 200
    recipe = "{epochs: null, train: {max_steps: 200}, schedule: {warmup_steps: 20}}"
    words = ["classification", "--model", "m", "--train_file", "t", "--validation", "v", "--output", "o"]
    config = parse("finetune", [*words, "--config", recipe, "--train.max_steps", "50"])
    assert config.schedule.warmup_in(50) == 5


def test_a_share_shrinks_by_itself():
    assert ScheduleConfig(warmup_share=0.1).warmup_in(50) == 5
    assert parse("pretrain", [*PLACES, "--train.max_steps", "5"]).schedule.warmup_of_steps is None
