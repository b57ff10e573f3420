"""A process that stands still is named by the others, with where they wait for it."""

import json
import os
import re
import signal
import time

import pytest

from launch.config import MonitorConfig
from launch.environment import Environment
from launch.heartbeat import Heartbeat
from launch.runs import HEARTBEATS
from tests.launching import PATIENCE_SECONDS, finish, pretrain_command, start, step_of
from tests.synthetic import make_shards


def wait_until(happened) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def beats(run) -> dict[int, dict]:
    return {rank: json.loads((run / HEARTBEATS / f"rank-{rank:05d}.json").read_text()) for rank in range(2)}


@pytest.mark.slow
def test_a_stopped_process_is_named_and_the_run_goes_on_with_it(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    process = start(pretrain_command(
        data, run, "--train.max_steps", "400", "--monitor.heartbeat_seconds", "0.3", "--monitor.hang_seconds", "3",
        processes=2,
    ))
    deadline = time.monotonic() + 120
    while step_of(run) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    stopped = beats(run)[1]["process"]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(8)
    os.kill(stopped, signal.SIGCONT)
    output = finish(process)
    # On a busy machine the start alone may take so long that it is reported too.
    reports = output.split("rank 0: no progress for")[1:]
    report = next(report for report in reports if "at step 0 in start" not in report
                  and re.search("rank 1: step .*its heartbeat stopped", report))
    assert "waited for: rank 1\n" in report
    # In the step, or in what follows it.
    assert "rank 0, thread MainThread:" in report and "trainer.py" in report, "where the one that waits is"
    assert {(beat["step"], beat["phase"]) for beat in beats(run).values()} == {(400, "ended")}


def test_a_disk_that_takes_no_heartbeat_is_said_once(tmp_path):
    said = []
    config = MonitorConfig(heartbeat_seconds=0.02, hang_seconds=60)
    with Heartbeat(tmp_path, Environment(), config, said.append):
        (tmp_path / HEARTBEATS).rename(tmp_path / "aside")
        (tmp_path / HEARTBEATS).write_text("")
        wait_until(lambda: said)
        time.sleep(0.1)  # in which it tries again, and says no more
        (tmp_path / HEARTBEATS).unlink()
        (tmp_path / HEARTBEATS).mkdir()
        wait_until(lambda: list((tmp_path / HEARTBEATS).glob("rank-*.json")))
    assert len(said) == 1 and "the heartbeat could not be written" in said[0]
    assert json.loads((tmp_path / HEARTBEATS / "rank-00000.json").read_text())["phase"] == "ended"
