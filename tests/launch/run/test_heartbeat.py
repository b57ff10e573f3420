"""A process that stands still is named by the others, with where they wait for it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from functools import partial

import pytest

from cloze.launch.cli import main
from cloze.launch.config import MonitorConfig
from cloze.launch.run.heartbeat import Heartbeat
from cloze.launch.run.runs import HEARTBEATS
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training import loop
from tests.forked import ForkedRun
from tests.launching import (
    PATIENCE_SECONDS,
    finish,
    kill_all,
    pretrain_arguments,
    pretrain_command,
    start,
    step_of,
    wait_until,
)
from tests.synthetic import make_shards


def beats(run) -> dict[int, dict]:
    return {rank: json.loads((run / HEARTBEATS / f"rank-{rank:05d}.json").read_text()) for rank in range(2)}


@pytest.mark.slow
def test_a_stopped_process_is_named_and_the_run_goes_on_with_it(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    process = start(
        pretrain_command(
            data,
            run,
            "--train.max_steps",
            "400",
            "--monitor.heartbeat_seconds",
            "0.3",
            "--monitor.hang_seconds",
            "3",
            processes=2,
        )
    )
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
    report = next(
        report
        for report in reports
        if "at step 0 in start" not in report and re.search("rank 1: step .*its heartbeat stopped", report)
    )
    assert "waited for: rank 1\n" in report
    # In the step, or in what follows it.
    assert "rank 0, thread MainThread:" in report and "loop.py" in report, "where the one that waits is"
    assert {(beat["step"], beat["phase"]) for beat in beats(run).values()} == {(400, "ended")}


def output_until(process: ForkedRun, *patterns: str) -> str:
    """What a run has printed as soon as all patterns are in it; then it is killed."""
    deadline, output = time.monotonic() + PATIENCE_SECONDS, ""
    try:
        while not all(re.search(pattern, output, re.DOTALL) for pattern in patterns):
            assert time.monotonic() < deadline and process.poll() is None, output
            output = process.printed()
    finally:
        kill_all(process)
        process.communicate(timeout=PATIENCE_SECONDS)
    return output


def stuck_main(rank: int, step: int, command: list[str]) -> int:
    """The command in a process whose data never come from that step on, on one rank."""
    make_step = loop.Loop.step

    def never():
        threading.Event().wait()
        yield

    def stuck(self, stream):
        make_step(self, never() if (self.environment.rank, self.progress.state.step) == (rank, step) else stream)

    loop.Loop.step = stuck
    return main(command)


OFTEN = ("--monitor.heartbeat_seconds", "0.2", "--monitor.hang_seconds", "2")


def test_a_process_that_waits_for_data_is_named_and_says_where(tmp_path):
    """It lives, and its heartbeat goes on."""
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    process = ForkedRun(pretrain_arguments(data, run, "--train.max_steps", "9", *OFTEN), 2, partial(stuck_main, 1, 3))
    output_until(
        process,
        r"rank 0: no progress for \d+ s, at step 3 in collective\..*waited for: rank 1\n",
        r"rank 1: no progress for \d+ s, at step 3 in data\..*rank 1, thread MainThread:.*, in never\n",
    )


def test_a_process_that_never_joins_is_named(tmp_path):
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = ForkedRun(
        pretrain_arguments(data, run, *OFTEN),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    output = output_until(process, "waited for: rank 1\n.*init_process_group")
    assert "rank 1: no heartbeat file" in output


def test_in_a_large_world_only_blocking_ranks_are_reported(tmp_path, monkeypatch):
    """1,000 ranks in a collective, two behind them: no rank reads the files of all but the first and the last."""
    config, said, now = MonitorConfig(heartbeat_seconds=10, hang_seconds=60), [], time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # a thousand files take a moment
    (tmp_path / HEARTBEATS).mkdir()
    for rank in range(1000):
        late = rank in (7, 512)
        (tmp_path / HEARTBEATS / f"rank-{rank:05d}.json").write_text(
            json.dumps(
                {
                    "step": 41,
                    "phase": "data" if late else "compute",
                    "since": now - 90,
                    "time": now,
                    "waiting": not late,
                    "host": f"node{rank // 8}",
                    "process": rank,
                }
            )
        )
    for rank in (3, 0):
        beat = Heartbeat(tmp_path, Environment(rank, 0, 1000), config, said.append)
        beat.beat(41, "compute")
        beat._is_waiting = lambda: True
        said.append(beat.report())
    middle, first = (report.partition("\nrank 0, thread")[0] for report in said)  # other tests have threads too
    assert "What ranks 0 and 999 print says who is waited for" in middle and "rank 512" not in middle
    assert "waited for: rank 7, 512" in first.splitlines()
    assert "  rank 512: step 41, data for 90 s (node64, process 512)" in first and first.count("  rank ") == 2


def test_a_disk_that_takes_no_heartbeat_is_reported_once(tmp_path):
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


def test_processes_that_an_earlier_part_had_more_of_are_forgotten(tmp_path):
    for world_size in (3, 2):
        for rank in reversed(range(world_size)):
            with Heartbeat(tmp_path, Environment(rank, rank, world_size), MonitorConfig()):
                pass
    assert sorted(path.name for path in (tmp_path / "heartbeats").iterdir()) == ["rank-00000.json", "rank-00001.json"]


def test_a_clock_that_is_set_anew_is_no_hang(tmp_path, monkeypatch):
    """An hour on, or back: the report comes after the time that has passed, and the files hold the new time."""
    config, said, clock = MonitorConfig(heartbeat_seconds=0.02, hang_seconds=60), [], time.time

    def written() -> dict:
        return json.loads((tmp_path / HEARTBEATS / "rank-00000.json").read_text())

    with Heartbeat(tmp_path, Environment(), config, said.append) as beat:
        beat.beat(3, "compute")
        for jump in (3600, -3600):
            monkeypatch.setattr(time, "time", lambda jump=jump: clock() + jump)
            wait_until(lambda jump=jump: abs(written()["time"] - clock() - jump) < 60)
            assert abs(written()["since"] - time.time()) < 60
            assert not said
        beat._moved -= 3600
        wait_until(lambda: said)
        assert "no progress for 36" in said[0]


def test_a_process_that_hangs_tells_of_others_by_what_they_sent(tmp_path):
    """Where processes share no folder rank 0 fetches their heartbeats; the others speak for themselves."""

    def fetch() -> None:
        beat = {"step": 3, "phase": "data", "since": 0, "time": 0, "waiting": False, "host": "b", "process": 7}
        (tmp_path / "0/heartbeats/rank-00001.json").write_text(json.dumps(beat))

    def never() -> None:
        raise AssertionError("rank 0 alone asks the store")

    with Heartbeat(tmp_path / "0", Environment(0, 0, 2, "torchrun"), MonitorConfig(), fetch=fetch) as heartbeat:
        told = heartbeat.report()
    assert "rank 1: step 3, data" in told and "waited for: rank 1" in told
    with Heartbeat(tmp_path / "1", Environment(1, 0, 2, "torchrun"), MonitorConfig(), fetch=never) as heartbeat:
        told = heartbeat.report()
    assert "rank 1: step 0" in told and "rank 0" not in told and "waited for" not in told
