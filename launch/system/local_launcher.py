"""Starts child processes that end with their parent: the ranks of `--processes N`, which replaces torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Literal

from cloze.launch.system.environment.gpus import visible_gpus
from cloze.launch.system.environment.launchers import child_variables
from cloze.launch.system.environment.parents import end_with
from cloze.launch.system.exit_status import EXIT_REQUEUE, STOP_SIGNALS, heard_signals
from cloze.launch.system.streams import print_line

# Seconds between two checks whether a process has ended, as in torchrun.
_LOOK_SECONDS = 0.1
# Seconds that the other processes have to end when one has failed; the same as torchrun's --shutdown-timeout.
_ENDING_SECONDS = 30.0


def run_ranks(name: str, arguments: list[str], wished: int | Literal["auto"]) -> int:
    """Run `cloze NAME ARGUMENTS` in several processes, forward signals, and return one exit status.

    Args:
        wished: number of processes; auto: one per GPU, or one on a machine without GPUs.

    Returns:
        The status of the first process that failed; 75 if they were stopped; else 0.
    """
    count = max(1, len(visible_gpus())) if wished == "auto" else wished
    print_line(
        f"cloze {name}: starting {count} process{'es' * (count > 1)} on this machine; Ctrl-C stops with a checkpoint"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "cloze", *name.split(), *arguments]
    with Children() as children:
        for rank in range(count):
            children.start(
                command,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
        return _wait(children.processes)


class Children:
    """Context manager: forwards this process's signals to the processes that `start` started. None of them is left at
    its end, nor (on Linux) when this process is killed.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.heard: int | None = None
        """The signal that was handed on last."""
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Children:
        self._before = {number: signal.signal(number, self._forward) for number in heard_signals()}
        return self

    def __exit__(self, *exception: object) -> None:
        _send(self.processes, signal.SIGKILL)  # none is left here unless this process fails
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start a command of Cloze with additional environment variables."""
        # A session of its own: Ctrl-C reaches only this process, which forwards it once.
        # A stop waits until it has imported what answers one (hear_stops): Python's own answer is a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = subprocess.Popen(
                command, start_new_session=True, env=child_variables(**variables, **end_with(os.getpid()))
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.processes.append(process)
        if self.heard is not None:  # a signal may have come before this process was in the list
            process.send_signal(self.heard)
        return process

    def _forward(self, number: int, frame: object) -> None:
        self.heard = number
        _send(self.processes, number)


def hear_stops() -> None:
    """Take the signals that came while this process could not answer them yet (`cloze/__main__.py`, `Children`), and
    later ones.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def shell_status(status: int) -> int:
    """A process's exit status as a shell reports it: 128 + the signal that ended it."""
    return 128 - status if status < 0 else status


def _send(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended; when one has failed, the others are terminated and, if they do not end, killed."""
    failed, since = None, 0.0
    while None in [rank.poll() for rank in ranks]:  # a list, so that every process is polled
        if failed is None:
            failed = next((rank.returncode for rank in ranks if rank.returncode not in (None, 0, EXIT_REQUEUE)), None)
            if failed is not None:
                _send(ranks, signal.SIGTERM)
                since = time.monotonic()
        elif time.monotonic() - since > _ENDING_SECONDS:
            _send(ranks, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    statuses = [rank.returncode for rank in ranks]
    worst = failed if failed is not None else next((each for each in statuses if each not in (0, EXIT_REQUEUE)), None)
    if worst is None:
        return EXIT_REQUEUE if EXIT_REQUEUE in statuses else 0
    return shell_status(worst)
