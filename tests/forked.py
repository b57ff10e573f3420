"""Runs whose processes are forked from one that has imported everything: they start in a second instead of many.

All that a command does after its imports, the making of its parser and the reading of what its fields are happens anew
in each process.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, arbitrary_address
from unittest import mock

from cloze.launch import cli
from cloze.launch.system.environment.launchers import child_variables
from cloze.launch.system.environment.process import fewer_imports
from tests.parallel import PRELOADED

with fewer_imports():
    from cloze.launch.system.exit_status import EXIT_COMPLETE, EXIT_REQUEUE

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(PRELOADED)


class _ServerWithCompiler(forkserver.ForkServer):
    """One more server, forked from the first, for runs that import torch's compiler, as DeepSpeed does at stage 3: a
    process of two steps takes 1.5 s of processor time instead of 3.9. No other run may have it.
    """

    def ensure_running(self) -> None:
        if self._forkserver_address is not None:
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := arbitrary_address("AF_UNIX"))
            listener.listen()
            until, alive = FORKSERVER.Pipe(duplex=False)
            handed = Connection(os.dup(listener.fileno())), until
            FORKSERVER.Process(target=_serve_with_compiler, args=handed, daemon=True).start()
        self._forkserver_address, self._forkserver_alive_fd = address, os.dup(alive.fileno())

    def forking(self) -> contextlib.AbstractContextManager:
        """A context in which processes are forked from this server."""
        self.ensure_running()  # from the other one
        return mock.patch.object(forkserver, "connect_to_new_process", self.connect_to_new_process)


def _serve_with_compiler(listener: Connection, until: Connection) -> None:
    """Import the compiler as a run does, when the optimizers have lost their wrappers for it, and fork on request."""
    with fewer_imports():
        from cloze.launch.engine.optimizers.uncompiled import without_compiler

        without_compiler()
        importlib.import_module("torch._dynamo")
    forkserver.main(listener.fileno(), until.fileno(), [])


_WITH_COMPILER = _ServerWithCompiler()
# A process that goes on when another has failed is asked to end, and made to after so long, as srun does.
GRACE_SECONDS = 10
# The same where another has stopped with a checkpoint or before it had joined: all stop together, but one alone that
# was signalled while it started leaves the others waiting for it.
STOPPING_SECONDS = 60


class ForkedRun:
    """A command in so many processes on this machine, started as srun starts them; with Popen's way to deal with it.

    Args:
        command: what follows `cloze`.
        main: what is called with it, as a test has changed it; a function of a module, which each process imports with
            all that it imports (transformers: 5 s).
        compiler: the processes have torch's compiler imported; by default if DeepSpeed will import it.
        variables: further environment variables.
    """

    def __init__(
        self,
        command: list[str],
        processes: int = 1,
        main: Callable[[list[str]], int] = cli.main,
        compiler: bool | None = None,
        **variables: str,
    ) -> None:
        if compiler is None:
            compiler = ("--zero.stage", "3") in itertools.pairwise(command)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._printed, theirs = FORKSERVER.Pipe(duplex=False)
        self._text = b""
        self._process = FORKSERVER.Process(
            target=_launch, args=(partial(main, command), processes, port, theirs, child_variables(**variables))
        )
        with _WITH_COMPILER.forking() if compiler else contextlib.nullcontext():
            self._process.start()
        theirs.close()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Exit status of the launcher; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the launcher, which passes SIGTERM on."""
        os.kill(self.pid, number)

    def printed(self) -> str:
        """What was printed so far; waits a moment for more."""
        if self._printed.poll(0.1):
            self._text += os.read(self._printed.fileno(), 1 << 16)
        return self._text.decode(errors="replace")

    def lose_reader(self) -> None:
        """Read no further; then wait for the end."""
        self._printed.close()
        self._process.join()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What was printed, when all processes have ended: the last one closes the pipe.

        Raises:
            subprocess.TimeoutExpired: they have not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self._printed.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired("cloze", timeout)
            part = os.read(self._printed.fileno(), 1 << 16)
            if not part:
                break
            self._text += part
        self._process.join()
        return self._text.decode(errors="replace"), None


def _launch(main: Callable[[], int], processes: int, port: int, printed: Connection, variables: dict[str, str]) -> None:
    """Fork the ranks and wait for them; exits with 0 or 75 if all did, with the first other status else."""
    os.environ.clear()  # it has those of when the first run was started
    os.environ.update(variables)
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    printed.close()
    ranks: list[int] = []

    def send(number: int) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):  # the last one that was waited for
                os.kill(pid, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to pass it on to
    signal.signal(signal.SIGTERM, lambda number, frame: send(number))
    late = itertools.chain((signal.SIGTERM,), itertools.repeat(signal.SIGKILL))

    def end_others(*_: object) -> None:
        send(next(late))
        signal.alarm(GRACE_SECONDS)

    signal.signal(signal.SIGALRM, end_others)
    for rank in range(processes):
        pid = os.fork()
        if not pid:
            _become(rank, processes, port)
            sys.exit(main())
        ranks.append(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    worst = EXIT_COMPLETE
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code not in (EXIT_COMPLETE, EXIT_REQUEUE) and worst in (EXIT_COMPLETE, EXIT_REQUEUE):
            end_others()
        elif code == EXIT_REQUEUE and worst == EXIT_COMPLETE:
            signal.alarm(STOPPING_SECONDS)
        if worst in (EXIT_COMPLETE, EXIT_REQUEUE):
            worst = max(worst, code) if code > 0 else code or worst
    sys.exit(worst if worst >= 0 else 128 - worst)  # the shell's convention for death by signal


def _become(rank: int, processes: int, port: int) -> None:
    """Make this process what a fresh one of that rank is before its first line."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.stdout.reconfigure(line_buffering=True)
    if processes == 1:
        return  # as by hand, without a launcher
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def torchrun_main(processes: int, main: Callable[[list[str]], int], command: list[str]) -> int:
    """What ForkedRun calls for `torchrun --standalone`: its agent, whose ranks are forked too."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        1, 1, processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork"
    )
    elastic_launch(settings, _rank_of_torchrun)(main, command)
    return EXIT_COMPLETE


def _rank_of_torchrun(main: Callable[[list[str]], int], command: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's
    sys.exit(main(command))
