"""A run's processes on this machine, started and ended together: what `--processes N` does instead of torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Literal

from cloze.launch.system.environment import child_variables, end_with, visible_gpus

# How often it is looked whether a process has ended, as torchrun does.
_LOOK_SECONDS = 0.1
# What the others may take to end when one has failed; torchrun's --shutdown-timeout is as long.
_ENDING_SECONDS = 30.0
_EXIT_REQUEUE = 75  # as in launch/run/preemption.py


def run_ranks(name: str, arguments: list[str], wished: int | Literal["auto"]) -> int:
    """Run `cloze NAME ARGUMENTS` in several processes, hand on signals, and return the exit status of all.

    Args:
        wished: how many processes; auto: one for each GPU, or one on a machine without.

    Returns:
        The status of the first process that failed; 75 if they were stopped; else 0.
    """
    count = max(1, len(visible_gpus())) if wished == "auto" else wished
    print(f"cloze {name}: starting {count} process{'es' * (count > 1)} on this machine; Ctrl-C stops with a checkpoint",
          flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "cloze", *name.split(), *arguments]
    ranks: list[subprocess.Popen] = []

    def hand_on(number: int, frame: object) -> None:
        _send(ranks, signal.SIGTERM if number == signal.SIGHUP else number)

    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, hand_on) for number in heard}
    try:
        for rank in range(count):
            # Sessions of their own: Ctrl-C reaches this process alone, which hands it on, once.
            ranks.append(subprocess.Popen(command, start_new_session=True, env=child_variables(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **end_with(os.getpid()))))
        return _wait(ranks)
    finally:
        _send(ranks, signal.SIGKILL)  # of which none is left, unless this process fails
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(ranks: list[subprocess.Popen], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _wait(ranks: list[subprocess.Popen]) -> int:
    """Until all have ended: by themselves, or asked to and then made to when one has failed."""
    failed, since = None, 0.0
    while None in [rank.poll() for rank in ranks]:  # each is asked
        if failed is None:
            failed = next((rank.returncode for rank in ranks if rank.returncode not in (None, 0, _EXIT_REQUEUE)), None)
            if failed is not None:  # it has waited for what the others had to say
                _send(ranks, signal.SIGTERM)
                since = time.monotonic()
        elif time.monotonic() - since > _ENDING_SECONDS:
            _send(ranks, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    statuses = [rank.returncode for rank in ranks]
    worst = failed if failed is not None else next((each for each in statuses if each not in (0, _EXIT_REQUEUE)), None)
    if worst is None:
        return _EXIT_REQUEUE if _EXIT_REQUEUE in statuses else 0
    return 128 - worst if worst < 0 else worst  # the shell's convention for death by signal
