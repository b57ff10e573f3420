"""Hundreds of malicious clients of `cloze serve`, and the answers that a regular client gets beside them."""

from __future__ import annotations

import gzip
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from tests.launch.serve.serving import connect, until_closed

# Attention among 48 tokens, of which the answer has the square: an answer that is a thousand times its request.
LARGE = json.dumps({"inputs": [" ".join(["cat"] * 46)] * 20}).encode()


def post(path: str, body: bytes, size: int | None = None, host: str = "localhost") -> bytes:
    """The bytes of a request; size: its declared length, if that is wrong."""
    return (
        f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if size is None else size}\r\n\r\n"
    ).encode() + body


def chunked(body: bytes, size: int = 1, extension: bytes = b"") -> bytes:
    """The bytes of a request for vectors, whose body comes in chunks of so many bytes, each with an extension."""
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    parts = (body[start : start + size] for start in range(0, len(body), size))
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


# Half heads, bodies that do not end, answers that nobody reads, clients that leave.
KINDS = (
    b"POST /embed HTT" + b"x" * 10_000,
    post("embed", b"[" * 1_000_000, 4_000_000),
    post("attention", LARGE),
    post("score", LARGE),
)


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


# What is sent on each of the connections that come in bursts.
SIEGES = {
    "silent": b"",
    "half heads": KINDS[0],
    "half bodies": KINDS[1],
    "chunks of a byte": chunked(b" " * 30_000),
    "chunks of 200 bytes": chunked(b" " * 1_000_000, 200),
    "chunks with extensions": chunked(b" " * 5000, 1, b";" + b"x" * 200),
    "thousands of headers": post("embed", b"").replace(b"\r\n\r\n", b"\r\nX-Y: z" * 3000 + b"\r\n\r\n"),
    "large answers": KINDS[2],
    "much to compute": KINDS[3],
    "garbage": b"\x00\xff\r\n\r\n",
}


def _burst(address: str, content: bytes, connections: int, stop: threading.Event) -> None:
    host, port = address.removeprefix("http://").split(":")
    with ExitStack() as stack:
        while not stop.is_set():
            clients = [stack.enter_context(socket.socket()) for _ in range(connections)]
            for client in clients:
                client.setblocking(False)
                client.connect_ex((host, int(port)))
            time.sleep(0.01)  # until they are connected
            for client in clients:
                with suppress(OSError):  # it takes no more, or has closed the connection
                    client.send(content)
            stop.wait(1)


def besiege(address: str, content: bytes, seconds: float, connections: int = 100) -> Iterator[tuple[int | None, float]]:
    """Open so many hostile connections each second; yields what an honest client gets meanwhile, again and again."""
    stop = threading.Event()
    attack = threading.Thread(target=_burst, args=(address, content, connections, stop))
    attack.start()
    try:
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            status, _ = exchange(address, HONEST)
            yield status, time.monotonic() - began
            time.sleep(0.02)
    finally:
        stop.set()
        attack.join()


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


def request(method: str, path: str, body: bytes, *further: str) -> bytes:
    """The bytes of a request after whose answer the connection ends; further: lines of its head."""
    lines = [
        f"{method} /{path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *further,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


HONEST = request("POST", "embed", b'{"inputs": ["the cat sat"]}')
# What is sent, and the statuses of which one must be answered; None where the connection may be closed meanwhile.
HOSTILE = (
    (b"\x00\xff\x13 garbage\r\n\r\n", {400}),
    (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n", {None, 400}),
    (b"POST /embed HTTP/1.1\r\nHost: localhost\r\n" + b"X-Y: z\r\n" * 20_000 + b"\r\n", {None, 400}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', *["X-Y: z"] * 150), {200}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', *["X-Y: z"] * 250), {400}),
    (chunked(b'{"inputs": ["cat"]}')[:-2] + b"X-Y: z\r\n" * 250 + b"\r\n", {400}),
    (b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", {400}),
    (b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: five\r\n\r\n", {400}),
    (b"POST /embed HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", {400}),
    (b"POST /embed HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", {400}),
    (request("GET", "embed", b""), {405}),
    (request("DELETE", "embed", b""), {405}),
    (request("POST", "../../etc/passwd", b"{}"), {404}),
    (request("POST", "no/such/path", b"{}"), {404}),
    (request("POST", "embed", b""), {422}),
    (request("POST", "embed", b"{not json"), {422}),
    (request("POST", "embed", b"[" * 100_000), {422}),
    (request("POST", "embed", b'{"inputs": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), {422}),
    (request("POST", "embed", b"\xff\xfe" * 100), {422}),
    (request("POST", "embed", b'{"inputs": ["\xc0\xaf"]}'), {422}),
    (request("POST", "embed", b'{"inputs": ["cat"], "inputs": ["sky"]}'), {422}),
    (request("POST", "embed", b'{"inputs": ["cat"], "layer": ' + b"9" * 5000 + b"}"), {422}),
    (request("POST", "embed", b'{"inputs": ["cat"], "layer": true}'), {422}),
    (request("POST", "embed", json.dumps({"inputs": ["cat"], "k\u202e" * 9999: 1}).encode()), {422}),
    (request("POST", "embed?layer=1", b'{"inputs": ["cat"]}'), {422}),
    (request("POST", "embed%00", b'{"inputs": ["cat"]}'), {404}),
    (request("POST", "static-offline-docs/..%2f..%2fetc/passwd", b""), {404, 405}),
    (request("GET", "static-offline-docs/%00", b""), {404}),
    (post("embed", b"", 5_000_000_000) + b"{}", {413}),
    (b"POST /embed HTTP/1.1\r\nHost: a\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", {400}),
    (b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400}),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 421}),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), {400}),
    (request("POST", "embed", b'{"inputs": ["\\ud83d"]}'), {422}),
    (request("POST", "embed", b'{"inputs": NaN}'), {422}),
    (request("POST", "embed", b'{"inputs": ["cat"], "layer": 1e999}'), {422}),
    (request("POST", "embed", b'{"inputs": ["cat"], "layer": ' + b"9" * 3000 + b"}"), {422}),
    (request("POST", "embed", b'{"inputs": ["cat"], "__proto__": 1}'), {422}),
    (request("POST", "embed", b'{"inputs": [{"text": {"text": "cat"}}]}'), {422}),
    (request("POST", "embed", json.dumps({"inputs": ["cat"] * 10_000}).encode()), {422}),
    (request("POST", "embed", json.dumps({"inputs": ["cat " * 10_000]}).encode()), {422}),
    (request("POST", "embed", json.dumps({"inputs": [""]}).encode()), {422}),
    (request("POST", "embed", b" " * (5 << 20)), {413}),
    (request("POST", "embed", gzip.compress(b" " * 10**6) * 100, "Content-Encoding: gzip"), {415}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', "Content-Encoding: br"), {415}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', "Transfer-Encoding: chunked"), {400}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', "Transfer-Encoding: xchunked"), {400}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', "Content-Length : 2"), {400}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', "Host: attacker.example"), {400}),
    (request("POST", "embed", b'{"inputs": ["cat"]}', "Origin: null"), {403}),
    (request("POST", "fill-mask", json.dumps({"inputs": ["[MASK]"], "top_k": 10**9}).encode()), {422}),
    (request("POST", "fill-mask", json.dumps({"inputs": ["no blank"]}).encode()), {422}),
    (request("POST", "word", json.dumps({"inputs": ["cat"], "word": "(.*)*$"}).encode()), {422}),
    (request("POST", "tag", json.dumps({"inputs": ["cat"]}).encode()), {404}),
)


def exchange(address: str, content: bytes) -> tuple[int | None, bytes]:
    """Send bytes and read until the server closes: the status, None for none, and the answer's body."""
    with connect(address) as client:
        client.settimeout(120)
        with suppress(OSError):  # it has answered before all was sent
            client.sendall(content)
        answer = b""
        with suppress(OSError):
            answer = until_closed(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return (int(words[1]) if answer.startswith(b"HTTP/1.1 ") else None), body


def ask_badly(address: str, count: int, seed: int) -> Iterator[tuple[str, str | None]]:
    """So many hostile requests, and an honest one after each ten; yields what was sent, and what was wrong about the
    answer, None if nothing was."""
    rng = random.Random(seed)
    _, expected = exchange(address, HONEST)
    vector = json.loads(expected)["results"][0]["vector"]
    for number in range(count):
        content, statuses = HOSTILE[number % len(HOSTILE)] if number < len(HOSTILE) else rng.choice(HOSTILE)
        status, _ = exchange(address, content)
        yield repr(content[:60]), None if status in statuses else f"status {status}, expected one of {statuses}"
        if number % 10 == 9:
            status, body = exchange(address, HONEST)
            right = status == 200 and json.loads(body)["results"][0]["vector"] == vector
            yield "an honest request", None if right else f"status {status} or another vector than at first"
