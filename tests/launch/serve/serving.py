"""Start `cloze serve` as a user does and talk to it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from cloze.launch.system.environment import child_variables
from tests.launching import ROOT


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server on a free port: its address and its process, which is stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cloze", "serve", str(folder), "--port", "0", *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_variables(OMP_NUM_THREADS="1"),
    )
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
