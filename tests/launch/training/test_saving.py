"""When checkpoints are saved by the clock; those by steps are in tests/distributed/test_resume.py."""

import time
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.checkpoint import TrainState
from cloze.launch.config import CheckpointConfig, PretrainConfig
from cloze.launch.run.runs import read_metrics
from cloze.launch.training.callbacks import RunView
from cloze.launch.training.saving import Saving
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments
from tests.synthetic import make_shards


def test_rank_0_wishes_a_checkpoint_when_its_time_has_come_and_the_one_before_is_written(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    checkpoints = SimpleNamespace(is_writing=False)
    config = PretrainConfig("", "", checkpoint=CheckpointConfig(every_minutes=10))
    saving = Saving(config, None, checkpoints, None, None, {}, None, None)
    ranks = [RunView(None, torch.device("cpu"), rank, 2, TrainState()) for rank in range(2)]
    assert not saving.wishes(ranks[0]).save
    now += 600
    assert saving.wishes(ranks[0]).save and not saving.wishes(ranks[1]).save
    checkpoints.is_writing = True
    assert not saving.wishes(ranks[0]).save
    by_steps = Saving(PretrainConfig("", ""), None, SimpleNamespace(is_writing=False), None, None, {}, None, None)
    now += 1e9
    assert not by_steps.wishes(ranks[0]).save


@pytest.mark.parametrize("minutes", [0.0, -5.0])
def test_no_minutes_are_refused(minutes):
    with pytest.raises(UserError, match=f"checkpoint.every_minutes: found {minutes:g}, expected more than 0"):
        CheckpointConfig(every_minutes=minutes)


def test_a_run_saves_by_the_clock_and_goes_on_from_there(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    options = ("--checkpoint.every_steps", "0", "--checkpoint.every_minutes", "1e-9", "--checkpoint.keep_last", "99")
    words = pretrain_arguments(data, run, *options)
    finish(ForkedRun([*words, "--train.max_steps", "12"], 2))
    steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert len(steps) > 1 and steps[-1] == 12
    printed = finish(ForkedRun([*words, "--train.max_steps", "14", "--checkpoint.accept_changes", "true"], 2))
    assert "resumed from step 12 of 14" in printed and read_metrics(run)[-1]["step"] == 14
