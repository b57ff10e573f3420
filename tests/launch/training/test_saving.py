"""When checkpoints are saved by the clock and left out by steps; those by steps are in
tests/distributed/test_resume.py."""

import time
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.checkpoint import writing as files
from cloze.launch.checkpoint.state import TrainState
from cloze.launch.cli import main
from cloze.launch.config import CheckpointConfig, PretrainConfig
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.tools.status import read_run
from cloze.launch.training import saving as steps
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
    saving = Saving(config, None, checkpoints, None, None, {}, None, None, print)
    ranks = [RunView(None, torch.device("cpu"), rank, 2, TrainState()) for rank in range(2)]
    assert not saving.wishes(ranks[0]).save
    now += 600
    assert saving.wishes(ranks[0]).save and not saving.wishes(ranks[1]).save
    checkpoints.is_writing = True
    assert not saving.wishes(ranks[0]).save
    by_steps = Saving(
        PretrainConfig("", ""), None, SimpleNamespace(is_writing=False), None, None, {}, None, None, print
    )
    now += 1e9
    assert not by_steps.wishes(ranks[0]).save


def test_rank_0_wishes_none_by_steps_while_a_long_one_is_written(monkeypatch):
    """Before anything is known one that is written within seconds is waited for; then the one before tells."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    checkpoints = SimpleNamespace(is_writing=True)
    saving = Saving(PretrainConfig("", ""), None, checkpoints, None, None, {}, None, None, print)
    ranks = [RunView(None, torch.device("cpu"), rank, 2, TrainState()) for rank in range(2)]
    assert not saving.wishes(ranks[0]).leave_out
    now += 6
    assert saving.wishes(ranks[0]).leave_out and not saving.wishes(ranks[1]).leave_out
    checkpoints.is_writing = False
    assert not saving.wishes(ranks[0]).leave_out
    checkpoints.is_writing = True
    assert saving.wishes(ranks[0]).leave_out, "it will take as long"
    checkpoints.is_writing, now = False, now + 1
    saving.wishes(ranks[0])
    checkpoints.is_writing = True
    assert not saving.wishes(ranks[0]).leave_out, "the last one took a second"


def slow_to_write(command: list[str]) -> int:
    """The command on a disk that takes a second for each file, where that is long."""
    write = files.write_hashed

    def late(copied, path):
        time.sleep(1)
        return write(copied, path)

    files.write_hashed, steps._SHORT_SECONDS = late, 0.0
    return main(command)


def test_a_checkpoint_by_steps_is_left_out_and_counted_while_the_one_before_is_written(tmp_path):
    """Not the last one of the run. What was left out is no step less: the run goes on from the last one."""
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    options = ("--train.max_steps", "12", "--checkpoint.every_steps", "2", "--checkpoint.keep_last", "99")
    printed = finish(ForkedRun(pretrain_arguments(data, run, *options), 2, slow_to_write))
    found = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert found[0] == 2 and found[-1] == 12 and len(found) < 6
    assert printed.count("left out") == 1 and "checkpoint.every_steps: step 4 was reached" in printed
    counts = [line["speed/checkpoints_left_out"] for line in read_metrics(run) if "speed/checkpoints_left_out" in line]
    assert counts == sorted(counts) and 1 <= counts[-1] <= 6 - len(found) + 1
    assert read_run(run).checkpoints_left_out == counts[-1]


@pytest.mark.parametrize("minutes", [0.0, -5.0])
def test_no_minutes_are_refused(minutes):
    with pytest.raises(UserError, match=f"checkpoint.every_minutes: found {minutes}, expected above 0"):
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
