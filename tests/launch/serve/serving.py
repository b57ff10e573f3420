"""Start `cloze serve` and talk to it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from cloze.launch import cli
from cloze.launch.system.environment.launchers import child_variables
from tests.forked import FORKSERVER
from tests.launching import ROOT


class ForkedServer:
    """`cloze serve` in a process that is forked, which takes a second instead of many; with Popen's way to deal with
    it.
    """

    def __init__(self, command: list[str]) -> None:
        (said, out), (complained, errors) = FORKSERVER.Pipe(duplex=False), FORKSERVER.Pipe(duplex=False)
        self._process = FORKSERVER.Process(
            target=_serve, args=(command, out, errors, child_variables(OMP_NUM_THREADS="1"))
        )
        self._process.start()
        for end in (out, errors):
            end.close()
        self.pid = self._process.pid
        self.stdout, self._stderr = (os.fdopen(os.dup(end.fileno())) for end in (said, complained))

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has said, and on the error stream, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        self._process.join(timeout)  # what it says fits into a pipe
        if self.returncode is None:
            raise subprocess.TimeoutExpired("cloze serve", timeout or 0.0)
        return self.stdout.read(), self._stderr.read()


def _serve(command: list[str], out: Connection, errors: Connection, variables: dict[str, str]) -> None:
    os.environ.clear()  # it has those of when the first process was forked
    os.environ.update(variables)
    for stream, end in ((1, out), (2, errors)):
        os.dup2(end.fileno(), stream)
        end.close()
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(cli.main(command))


@contextmanager
def server(folder: Path, *options: str, fresh: bool = False) -> Iterator[tuple[str, ForkedServer | subprocess.Popen]]:
    """A server on a free port: its address and its process, which is stopped at the end.

    Args:
        fresh: start it as a user does, in a Python of its own.
    """
    command = ["serve", str(folder), "--port", "0", *options]
    process: ForkedServer | subprocess.Popen
    if fresh:
        process = subprocess.Popen(
            [sys.executable, "-m", "cloze", *command],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_variables(OMP_NUM_THREADS="1"),
        )
    else:
        process = ForkedServer(command)
    line = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", line)
    if not found:
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    try:
        yield found[0], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def until_closed(client: socket.socket) -> bytes:
    """All that is left to read until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def read_meters(address: str, client=httpx) -> dict[str, float]:
    """What /metrics tells, by name with labels."""
    lines = client.get(address + "/metrics", timeout=60).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
