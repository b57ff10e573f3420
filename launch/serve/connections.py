"""Limits on connections: their number, how long they may be idle, and which one is closed for a new one.

uvicorn has no such limits: its limit_concurrency counts idle connections as active, and responds instead of closing.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any, Protocol

from cloze.launch.serve.config import ServeConfig
from cloze.pipeline.errors import UserError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol
else:
    H11Protocol = object  # uvicorn is in an extra: `protocol` sets the base class

# Open files besides the connections: weights, the tokenizer, libraries, the listening socket.
_OTHER_FILES = 200


def make_room_for_files(config: ServeConfig) -> None:
    """Raise this process's limit of open files to the number that its connections need.

    Raises:
        UserError: the hard limit is lower.
    """
    needed = config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"serve.max_connections: found {config.max_connections}, expected at most "
            f"{hard - _OTHER_FILES}, since a process may open {hard} files here; lower it, or raise "
            "`ulimit -Hn`"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Holder(Protocol):
    """The interface of a request that holds memory: bytes that it holds, and a method to release them."""

    held: int

    def free(self, count: int) -> None: ...


class _Bounded(H11Protocol):
    """Mixin for uvicorn's h11 protocol that enforces the limits.

    Args:
        bounds: limits of the server.
        waiting: connections that wait for their client, longest waiting first.
        request: the current request, whose memory is counted.
    """

    bounds: ServeConfig
    waiting: dict[_Bounded, None]
    request: Holder | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.bounds.max_connections:
            if not self.waiting:
                self.transport = transport
                transport.abort()
                return
            next(iter(self.waiting)).abort()
        super().connection_made(transport)
        self._wait()

    def _wait(self) -> None:
        self.cancel_deadline()
        self.wait()
        self._deadline = self.loop.call_later(self.bounds.read_seconds, self.abort)

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_events(self) -> None:
        cycle = self.cycle
        super().handle_events()
        if self.cycle is not cycle:  # the headers are complete; the reader of the body has its own time limit
            self.cancel_deadline()

    def wait(self) -> None:
        """Mark the connection as waiting for its client, to send a request or to read the response."""
        self.waiting.pop(self, None)
        self.waiting[self] = None

    def whole(self) -> None:
        """Mark the request as complete: the connection is not closed for another one until the response is sent."""
        self.waiting.pop(self, None)

    def make_room(self, count: int) -> bool:
        """Close the connection that has waited longest for its client among those that hold `count` bytes or more.
        Small requests are thus served however much memory others hold.

        Returns:
            Whether there was one.
        """
        for other in self.waiting:
            if other is not self and other.request is not None and other.request.held >= count:
                other.request.free(other.request.held)
                other.abort()
                return True
        return False

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        # a client that does not read the rest must not keep the connection open forever
        if self.transport.is_closing():
            self._deadline = self.loop.call_later(self.bounds.write_seconds, self.abort)
        elif self.cycle is cycle:
            self._wait()
        else:  # the next request has arrived already
            self.wait()

    def abort(self) -> None:
        """Close at once, without reading or writing the rest."""
        self._end()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _end(self) -> None:
        self.cancel_deadline()
        self.waiting.pop(self, None)
        self.connections.discard(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        if self.flow is not None:  # otherwise the connection was refused
            super().connection_lost(error)


def protocol(config: ServeConfig) -> type[asyncio.Protocol]:
    """uvicorn's h11 protocol with limits on the number of connections and on their idle time.

    A connection waits for its client from its beginning, or from the end of its last response, until its request is
    complete, and again while the response is read. At the maximum number of connections the longest waiting one is
    closed for a new one, so idle connections do not keep out others. `scope["state"]["connection"]` is the connection,
    for middleware.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("Connection", (_Bounded, H11Protocol), {"bounds": config, "waiting": {}})
