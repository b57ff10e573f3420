"""Two machines that share nothing but a store, and processes that are killed at random moments, in uploads too."""

from __future__ import annotations

import os
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from cloze.launch.checkpoint.fetching import fetch_run, read_index
from cloze.launch.run.commits import Commit, read_commits
from cloze.pipeline.stores.places import to_place
from tests.forked import GRACE_SECONDS, ForkedRun
from tests.launching import PATIENCE_SECONDS, assert_same_weights, finish, kill_all, train, weights
from tests.stores.server import Answer, Proxy, Request
from tests.stores.stored_runs import Machine, assert_nothing_but_what_counts, finish_all, read_log, start_on
from tests.synthetic import make_shards

KILLS = int(os.environ.get("STORE_KILLS", "6"))
WINDOW_SECONDS = 4.0  # after a start's first request, in which the moment lies; its first step comes some 3 after it
# More than the starts can do before they are killed.
STEP_SECONDS, STEPS = 0.15, 24 * KILLS
RUN = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", "2", "--zero.stage", "1")
LOCAL = ("--checkpoint.local", "1")  # of some starts


class Uploads:
    """Lets each part of a checkpoint take a moment on its way, and knows how many are on it."""

    def __init__(self, proxy: Proxy) -> None:
        self.under_way = 0
        self._proxy, self._lock = proxy, threading.Lock()
        proxy.fault = self._slow

    def _slow(self, request: Request) -> Callable[[Answer], Answer] | None:
        if request.method != "PUT" or "/checkpoints/step-" not in request.path:
            return None
        with self._lock:
            self.under_way += 1

        def arrive(answer: Answer) -> Answer:
            time.sleep(0.1)
            with self._lock:
                self.under_way -= 1
            return answer

        return arrive


@pytest.mark.slow
def test_processes_killed_at_random_moments(tmp_path, bucket, proxy):
    """STORE_KILLS and STORE_SEED give another number of kills and other moments.

    Each time one process or both are killed, then started again, some on an empty disk; in every other round the moment
    lies in an upload. After each the store's list names whole checkpoints only, and in the end the weights and the
    curve are those of a run that nobody disturbed.
    """
    seed = int(os.environ.get("STORE_SEED", random.SystemRandom().randrange(10**6)))
    print(f"STORE_SEED={seed}")  # shown where the test fails
    draw = random.Random(seed)
    data, output = make_shards(tmp_path / "data", mask_sets=0), f"{bucket}/runs/own"
    train(data, tmp_path / "undisturbed", *RUN, processes=2)
    uploads, numbers = Uploads(proxy), iter(range(10**6))
    machines = [Machine(tmp_path / f"machine-{next(numbers)}") for _ in range(2)]
    resumed, near, newest = 0, 0, 0
    for kill in range(KILLS):
        seen = len(proxy.requests)
        local = LOCAL if draw.random() < 0.5 else ()
        processes = start_on(machines, data, output, *RUN, *local, step_seconds=STEP_SECONDS)
        try:
            _wait(lambda seen=seen: len(proxy.requests) > seen, processes)
            if kill % 2:  # while something is on its way, and not before the run has got further
                _wait(lambda newest=newest: max(_commits(output), default=0) > newest, processes)
                time.sleep(draw.uniform(0.0, 1.0))
                _wait(lambda: uploads.under_way > 0, processes)
            else:
                time.sleep(draw.uniform(0.0, WINDOW_SECONDS))
            victims = draw.choice([processes, processes[:1], processes[1:]])
            assert all(process.poll() is None for process in processes), "a run ended before it was killed"
            for victim in victims:
                kill_all(victim)
            printed = [_end(process) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    kill_all(process)
        assert all(process.returncode != 0 for process in processes), printed
        resumed += "resumed from step" in printed[0]
        near += "scratch" in printed[0]
        newest = max(newest, *_whole_checkpoints(output), 0)
        machines = [
            Machine(tmp_path / f"machine-{next(numbers)}") if draw.random() < 0.3 else machine for machine in machines
        ]
    printed = finish_all(start_on(machines, data, output, *RUN))
    print(f"{KILLS} kills; {resumed} starts had gone on from a checkpoint, {near} of them from scratch")
    assert resumed and int(re.search(r"resumed from step (\d+) of", printed)[1]) >= newest > 0
    assert_nothing_but_what_counts(output)
    assert [line["step"] for line in read_log(output) if "train/loss" in line] == list(range(1, STEPS + 1))
    assert_same_weights(weights(fetch_run(to_place(output), warn=print)), weights(tmp_path / "undisturbed"))


def _end(process: ForkedRun) -> str:
    """What a process prints until it ends; as launchers do, it is ended where it waits for one that has not come."""
    try:
        process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        kill_all(process)
    return finish(process, None)


def _wait(reached: Callable[[], bool], processes: list) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, [each.communicate(timeout=10)[0][-4000:] for each in ended]
        time.sleep(0.01)


def _commits(output: str) -> dict[int, Commit]:
    return read_commits(to_place(output) / "checkpoints" / "commits.json")


def _whole_checkpoints(output: str) -> list[int]:
    """Steps of the checkpoints that count, each of which has all its objects: `read_index` raises if not."""
    commits = _commits(output)
    for step, commit in commits.items():
        read_index(to_place(output) / "checkpoints", step, commit)
    return sorted(commits)
