"""Runs whose output is in a store, on machines that share nothing but the store; and what a store then holds."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cloze.launch.cli import main
from cloze.launch.run import store_retries
from cloze.launch.run.commits import read_commits
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.runs import STATUS
from cloze.launch.run.status_file import read_status
from cloze.launch.run.uploaded_logs import LogReader
from cloze.launch.training import loop
from cloze.pipeline.stores import clients, leases
from cloze.pipeline.stores.places import to_place
from cloze.pipeline.stores.temporary_folders import temporary_folder
from tests.forked import ForkedRun
from tests.launching import PATIENCE_SECONDS, finish, kill_all, pretrain_arguments

PATIENCE = "--checkpoint.store_patience_seconds"


def changed_main(command: list[str], quick: bool = True, step_seconds: float = 0.0) -> int:
    """The command in a process that is changed.

    Args:
        quick: whether it waits seconds where others wait minutes: for an abandoned lease, for a store.
        step_seconds: that each step takes longer.
    """
    if quick:
        leases.SECONDS = 2.0
        clients.RETRIES, clients.RETRY_SECONDS = 3, 2.0
        clients._FIRST_WAIT, clients._LONGEST_WAIT = 0.02, 0.2
        store_retries._REST_SECONDS = 0.2
    make_step = loop.Loop.step

    def slowed(self, *arguments):
        time.sleep(step_seconds)
        make_step(self, *arguments)

    if step_seconds:
        loop.Loop.step = slowed
    return main(command)


class Machine:
    """A machine with a scratch disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        (folder / "cache").mkdir(parents=True)

    def start(self, data: Path, output: str, *overrides: str, **options) -> ForkedRun:
        """A pretraining."""
        return self.begin(pretrain_arguments(data, output, *overrides), **options)

    def begin(
        self, command: list[str], processes: int = 1, step_seconds: float = 0.0, quick: bool = True, **variables: str
    ) -> ForkedRun:
        if quick and PATIENCE not in command:
            command = [*command, PATIENCE, "5"]
        return ForkedRun(
            [*command, "--monitor.store_seconds", "0.5"],
            processes,
            partial(changed_main, quick=quick, step_seconds=step_seconds),
            **self.variables,
            **variables,
        )


def train_on(machine: Machine, data: Path, output: str, *overrides: str, processes: int = 1, status: int = 0) -> str:
    """Run to the end; returns what was printed."""
    return finish(machine.start(data, output, *overrides, processes=processes), status)


def start_on(machines: list[Machine], data: Path, output: str, *overrides: str, **options) -> list[ForkedRun]:
    """A pretraining by one process on each machine."""
    return begin_on(machines, pretrain_arguments(data, output, *overrides), **options)


def begin_on(machines: list[Machine], command: list[str], **options) -> list[ForkedRun]:
    """One process on each machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    count = str(len(machines))  # all of them share this one's cores
    common = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": count,
        "WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [machine.begin(command, **options, RANK=str(rank), **common) for rank, machine in enumerate(machines)]


def finish_all(processes: list[ForkedRun], status: int = 0) -> str:
    """Wait for all; returns what rank 0 has printed."""
    try:
        return [finish(process, status) for process in processes][0]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                kill_all(process)


def committed(output: str) -> list[int]:
    """Steps of the checkpoints that count."""
    return sorted(read_commits(to_place(output) / "checkpoints/commits.json"))


def keys(output: str) -> list[str]:
    """All objects of a run, by their names below it."""
    place = to_place(output)
    return [each.key[len(place.key) + 1 :] for each in place.objects()]


def assert_nothing_but_what_counts(output: str) -> None:
    """That the store has no file of a checkpoint that does not count."""
    commits = json.loads((to_place(output) / "checkpoints/commits.json").read_bytes())["commits"]
    counted = {f"step-{int(step):08d}/{commit['folder']}" for step, commit in commits.items()}
    found = {"/".join(key.split("/")[1:3]) for key in keys(output) if key.startswith("checkpoints/step-")}
    assert found == counted


def told_state(output: str) -> str | None:
    """How the run stands by the status that arrived last."""
    folder = temporary_folder()
    LogReader(to_place(output)).write(folder, [STATUS])
    return read_status(folder).get("state")


def read_log(output: str) -> list[dict]:
    """The lines of a run's metrics.jsonl, as they arrived."""
    folder = temporary_folder()
    LogReader(to_place(output)).write(folder)
    return read_metrics(folder)


def wait_until(reached: Callable[[], bool], process: ForkedRun) -> None:
    """Until something is so; the run must not end before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=10)[0][-4000:]
        time.sleep(0.05)  # each look is requests to a server on this machine
