"""Clients of `cloze serve` that mean ill, by the hundreds, and what an honest one is answered meanwhile."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from tests.launch.serving import connect

# Attention among 48 tokens, of which the answer has the square: an answer that is a thousand times its request.
LARGE = json.dumps({"inputs": [" ".join(["cat"] * 46)] * 20}).encode()


def post(path: str, body: bytes, size: int | None = None, host: str = "x") -> bytes:
    """The bytes of a request; size: its length as it is told, if that is not true."""
    return (f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body) if size is None else size}\r\n\r\n").encode() + body


# Half heads, bodies that do not end, answers that nobody reads, clients that leave.
KINDS = (b"POST /embed HTT" + b"x" * 10_000, post("embed", b"[" * 1_000_000, 4_000_000), post("attention", LARGE),
         post("score", LARGE))


def embed(address: str) -> tuple[int, float]:
    """Status of the answer to one word, and seconds until it came."""
    began = time.perf_counter()
    status = httpx.post(address + "/embed", json={"inputs": ["cat"]}, timeout=300).status_code
    return status, time.perf_counter() - began


def flood(address: str, connections: int, every: int, stack: ExitStack) -> Iterator[tuple[int, float]]:
    """Open so many hostile connections, which the stack closes; yields what an honest client gets after every few."""
    for number in range(1, connections + 1):
        client = stack.enter_context(connect(address))
        client.setblocking(False)
        with suppress(OSError):  # it takes no more, or has closed the connection
            client.send(KINDS[number % 4])
        if number % 4 == 3:
            client.close()
        if number % every == 0:
            yield embed(address)


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """This process may open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def peak_of(pid: int) -> int:
    """Most bytes of memory that a process has had."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in each]
    return int(line.split()[1]) << 10
