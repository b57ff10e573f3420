"""The largest body of a request, held before anything reads it."""

import asyncio

# A socket that is closed with unread bytes resets the connection, and the answer may be lost on its way (RFC 9112, 9.6:
# half-close, read on, then close; nginx's lingering_timeout is as long).
LINGER_SECONDS = 5


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes` is answered 413, whatever its headers say."""

    def __init__(self, app, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages, size = [], 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                await self._refuse(receive, send)
                return
            if not message.get("more_body", False):
                break
        replayed = iter(messages)

        async def receive_again():
            return next(replayed, None) or await receive()

        await self._app(scope, receive_again, send)

    async def _refuse(self, receive, send) -> None:
        """Answer at once, then let the client end its body, which nobody keeps, before the connection is closed."""
        body = b'{"detail": "body: found more than %d bytes; send fewer or shorter texts"}' % self._max_bytes
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
                   (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            await asyncio.wait_for(self._discard(receive), LINGER_SECONDS)
        except asyncio.TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})

    async def _discard(self, receive) -> None:
        while (await receive()).get("more_body", False):
            pass
