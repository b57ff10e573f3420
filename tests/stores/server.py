"""A real S3 server for tests: moto's, in a process of its own on loopback; and a proxy before it that makes faults."""

from __future__ import annotations

import base64
import hashlib
import http.client
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Without the request log, of which nobody reads.
_SERVER = """
import logging, sys, threading
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server():
    """Its port. It ends with this process, which holds its standard input."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield next(int(line.split()[1]) for line in process.stdout if line.startswith("port "))
        finally:
            process.kill()


@dataclass(frozen=True)
class Request:
    """What a fault is decided by. number: of the requests before it with the same method and path."""

    method: str
    path: str
    headers: dict[str, str]
    number: int


# What a fault does to an answer (status, headers, body): None is a cut connection, after a wrong length if it is bytes.
Answer = tuple[int, dict[str, str], bytes]
Fault = Callable[[Request], "Callable[[Answer], Answer | bytes | None] | None"]


@dataclass
class Proxy:
    """Passes requests on; `fault`, where it gives something for a request, changes the answer; a request for which the
    store is `away` is not passed on; `damage` changes what a request brings, which the proxy then refuses as S3 does if
    it came with a checksum. `requests` are kept."""

    server_port: int
    fault: Fault = lambda request: None
    away: Callable[[Request], bool] = lambda request: False
    damage: Callable[[Request, bytes], bytes] = lambda request, body: body
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    ignored_headers: tuple[str, ...] = ()  # that the server is not told of

    @contextmanager
    def running(self):
        proxy, counts, lock = self, {}, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    path = self.path.partition("?")[0]
                    number = counts[self.command, path] = counts.get((self.command, path), -1) + 1
                    request = Request(self.command, self.path, dict(self.headers), number)
                    proxy.requests.append(request)
                change = proxy.fault(request)
                body = proxy.damage(request, body)
                told = {name.lower(): value for name, value in request.headers.items()}.get("x-amz-checksum-sha256")
                if proxy.away(request):
                    answer = BUSY
                elif told is not None and told != base64.b64encode(hashlib.sha256(body).digest()).decode():
                    answer = 400, {"Content-Length": str(len(BAD_DIGEST))}, BAD_DIGEST
                else:
                    answer = proxy.passed_on(request, body)
                if change is not None:
                    answer = change(answer)
                self.give(answer)

            def give(self, answer: Answer | bytes | None) -> None:
                if not isinstance(answer, tuple):
                    if answer:  # half of what is promised
                        self.send_response(200)
                        self.send_header("Content-Length", str(2 * len(answer)))
                        self.end_headers()
                        self.wfile.write(answer)
                    self.close_connection = True
                    return
                status, headers, content = answer
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *_) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address) -> None:
                pass  # the client has gone

        server = Server(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def passed_on(self, request: Request, body: bytes) -> Answer:
        """The server's own answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=60)
        try:
            headers = {
                name: value for name, value in request.headers.items() if name.lower() not in self.ignored_headers
            }
            connection.request(request.method, request.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            dropped = {"transfer-encoding", "connection", "content-length"}
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
            length = answer.getheader("Content-Length") if request.method == "HEAD" else None
            return answer.status, headers | {"Content-Length": length or str(len(content))}, content
        finally:
            connection.close()


@dataclass
class GoogleProxy(Proxy):
    """Speaks as Google's store does in its XML interface, before a server that speaks as S3: both have the same paths,
    bodies and listings; a bearer's token, generations and conditions on these are Google's own, and are kept here.

    Answers what obstore asks: no emulator of that interface can be installed.
    """

    token: str = "a-very-secret-token"
    generations: dict[str, int] = field(default_factory=dict)
    _one: threading.Lock = field(default_factory=threading.Lock)

    def passed_on(self, request: Request, body: bytes) -> Answer:
        """The server's answer to a request that Google would take."""
        given = {name.lower(): value for name, value in request.headers.items()}
        path = urllib.parse.unquote(request.path.partition("?")[0])
        if given.pop("authorization", None) != f"Bearer {self.token}":
            return 401, {"Content-Length": "0"}, b""
        wanted = given.pop("x-goog-if-generation-match", None)
        if request.method == "PUT" or request.method == "DELETE":
            with self._one:
                if wanted is not None and int(wanted) != self.generations.get(path, 0):
                    return 412, {"Content-Length": "0"}, b""
                answer = super().passed_on(self._signed(request, path, given), body)
                if answer[0] < 300:
                    self.generations.pop(path, None)
                    if request.method == "PUT":
                        self.generations[path] = time.time_ns()
        else:
            answer = super().passed_on(self._signed(request, path, given), body)
        status, headers, content = answer
        if path in self.generations:
            headers["x-goog-generation"] = str(self.generations[path])
        return status, headers, content

    @staticmethod
    def _signed(request: Request, path: str, headers: dict[str, str]) -> Request:
        """As a request to S3."""
        signed = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
        query = request.path.partition("?")[2]
        quoted = urllib.parse.quote(path) + (f"?{query}" if query else "")
        return replace(request, path=quoted, headers={**headers, "Authorization": signed})


BAD_DIGEST = b"<Error><Code>BadDigest</Code><Message>The SHA256 you specified did not match</Message></Error>"
BUSY = 503, {"Content-Length": "0"}, b""


def first(times: int, change: Callable, wanted: Callable[[Request], bool] = lambda _: True) -> Fault:
    """A fault of the first so many requests for each object."""
    return lambda request: change if request.number < times and wanted(request) else None


def slow(seconds: float) -> Callable[[Answer], Answer]:
    """An answer that comes late."""

    def change(answer: Answer) -> Answer:
        time.sleep(seconds)
        return answer

    return change
