"""Checks of each request: of its host and site, API key, bytes and times; a full queue is refused in batching.py."""

import asyncio
import json
from dataclasses import dataclass

from cloze.launch.serve.asgi import App, Message, Receive, Scope, Send
from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.keys import is_authorized, is_local
from cloze.pipeline.fields import Fields

# Closing a socket with unread bytes resets the connection, and the response may be lost (RFC 9112, 9.6: half-close,
# keep reading, then close; nginx's lingering_timeout is the same).
LINGER_SECONDS = 5
# A response is sent in pieces, each after the one before was sent: what the client does not read stays here and is
# counted.
PIECE_BYTES = 1 << 16


class Refused(Exception):
    """A request is refused with this status and line, and the rest of it is not read."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


@dataclass
class Traffic:
    """Bytes held by all requests and responses, and the number of requests dropped before their response was
    complete.
    """

    most: int
    held: int = 0
    dropped: int = 0


class RequestLimits:
    """ASGI middleware before all others except CountRequests: reads the body, calls the application, sends its
    response.

    - without keys on an address of this machine, a Host of another name is answered 421, an Origin of another site 403;
    - keys are required and the request has none: 401, and the body is not read;
    - a body of more than max_body_bytes is answered 413, one that takes longer than read_seconds 408;
    - bodies and responses of all requests hold at most max_bytes_in_flight: beyond, the connection of the longest
      awaited client among those that hold at least as much as the new one is closed; if there is none the new one gets
      503;
    - a response of which the client reads nothing for write_seconds is dropped with its connection;
    - when the client disconnects, the application is cancelled.
    """

    def __init__(self, app: App, config: ServeConfig, traffic: Traffic, keys: list[bytes] | None) -> None:
        self._app, self._config, self._traffic, self._keys = app, config, traffic, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(self._app, self._config, self._traffic, scope, receive, send)
        try:
            try:
                if self._keys is None and not self._config.no_auth:
                    _refuse_other_sites(scope)
                if not is_authorized(scope, self._keys):
                    raise Refused(
                        401, "authorization: found no key of this server, expected `Authorization: Bearer KEY`"
                    )
                await request.answer()
            except Refused as refused:
                await request.refuse(refused)
        except asyncio.CancelledError:  # cancelled at the end of the grace period
            self._traffic.dropped += request.accepted
            await request.abort()
        finally:
            request.end()


def _refuse_other_sites(scope: Scope) -> None:
    """Refuse what a page of another site makes a browser on this machine send.

    Raises:
        Refused: the request has another Host or Origin than this machine.
    """
    given = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
    host = next((value for name, value in given if name == b"host"), "")
    advice = "give the server keys (api_key_file), or no_auth if a proxy checks who asks"
    if not is_local(f"//{host}"):
        raise Refused(
            421,
            f"host: found {host[:100]!r}, expected localhost or an address of this machine like 127.0.0.1; {advice}",
        )
    for name, origin in given:
        if name == b"origin" and not is_local(origin):
            raise Refused(403, f"origin: found {origin[:100]!r}, expected a page of this machine; {advice}")


class _Request:
    def __init__(
        self, app: App, config: ServeConfig, traffic: Traffic, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._app, self._config, self._traffic = app, config, traffic
        self._scope, self._receive, self._send = scope, receive, send
        # None in tests without a connection.
        self._connection = scope.get("state", {}).get("connection")
        self._start: Fields | None = None
        self.held = 0
        self.accepted = False
        self._body_read = self._started = False
        if self._connection is not None:
            self._connection.request = self

    def _hold(self, count: int) -> None:
        """Count `count` more bytes as held.

        Raises:
            Refused: the server holds too many bytes.
        """
        while self._traffic.held + count > self._traffic.most:
            if self._connection is None or not self._connection.make_room(self.held + count):
                raise Refused(503, "too many bytes of other requests are being received and sent; try again later")
        self._traffic.held += count
        self.held += count

    def free(self, count: int) -> None:
        """Count `count` bytes less as held; does nothing if all were released already."""
        count = min(count, self.held)
        self._traffic.held -= count
        self.held -= count

    def end(self) -> None:
        """Release all bytes."""
        self.free(self.held)
        if self._connection is not None and self._connection.request is self:
            self._connection.request = None

    async def answer(self) -> None:
        try:
            body = await asyncio.wait_for(self._read(), self._config.read_seconds)
        except asyncio.TimeoutError:
            raise Refused(
                408, f"body: found none that is whole after {self._config.read_seconds:g} s; send it faster"
            ) from None
        if body is None:
            return
        self._body_read = self.accepted = True
        if self._connection is not None:
            self._connection.whole()
        left = asyncio.ensure_future(self._until_left())
        work = asyncio.ensure_future(self._app(self._scope, self._replayed(body, left), self._bounded))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work  # raises the application's exception
        finally:
            left.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _read(self) -> bytes | None:
        """The whole body; None if the client disconnected before its end."""
        # All of it before the client, which may wait for a 100, sends the body.
        given = dict(self._scope["headers"])
        coding = given.get(b"content-encoding", b"identity").decode("latin-1").strip()
        if coding.lower() != "identity":
            raise Refused(415, f"content-encoding: found {coding[:60]!r}, expected none; send the body as it is")
        if b"transfer-encoding" in given and b"content-length" in given:
            # A proxy that goes by the length would take what follows for another client's request (RFC 9112, 6.1).
            raise Refused(400, "content-length: found it beside transfer-encoding, expected one of them; send one")
        # The server's parser has checked the number.
        if int(given.get(b"content-length", 0)) > self._config.max_body_bytes:
            raise self._too_large()
        body = bytearray()  # a list of pieces of a byte each would take 40 times as much memory
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            body += piece
            if len(body) > self._config.max_body_bytes:
                raise self._too_large()
            self._hold(len(piece))
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> Refused:
        return Refused(413, f"body: found more than {self._config.max_body_bytes} bytes; send fewer or shorter texts")

    @staticmethod
    def _replayed(body: bytes, left: asyncio.Future[Message]) -> Receive:
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return given.pop() if given else await asyncio.shield(left)

        return receive

    async def _until_left(self) -> Message:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        return message

    async def _bounded(self, message: Message) -> None:
        """Send a message in pieces. The response's start is sent with the first piece of the body, since the body may
        be refused.
        """
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        self._hold(len(body))
        start, self._start = self._start, None
        if start is not None:
            self._started = True
            if self._connection is not None:
                self._connection.wait()
            await self._within(start)
        for low in range(0, max(1, len(body)), PIECE_BYTES):
            last = low + PIECE_BYTES >= len(body)
            await self._within(
                {"type": "http.response.body", "body": body[low : low + PIECE_BYTES], "more_body": more or not last}
            )
        self.free(len(body))

    async def _within(self, message: Message) -> None:
        try:
            await asyncio.wait_for(self._send(message), self._config.write_seconds)
        except asyncio.TimeoutError:
            await self.abort()

    async def abort(self) -> None:
        """Close the connection without the rest of the answer."""
        if self._connection is not None:
            self._connection.abort()
            await asyncio.sleep(0)  # sending does nothing from now on

    async def refuse(self, refused: Refused) -> None:
        """Respond at once; the rest of an incomplete body is read and discarded for a while before the connection is
        closed.
        """
        if self._started:  # a part of the response was sent already
            await self.abort()
            return
        body = json.dumps({"detail": refused.line}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if refused.status == 503:
            headers.append((b"retry-after", b"1"))
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self._send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if not self._body_read:
            try:
                await asyncio.wait_for(self._discard(), LINGER_SECONDS)
            except asyncio.TimeoutError:
                pass
        await self._send({"type": "http.response.body", "body": b""})

    async def _discard(self) -> None:
        while (await self._receive()).get("more_body", False):
            pass
