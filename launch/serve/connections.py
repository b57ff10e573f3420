"""Bounds on connections: their number, how long they may be silent, and which one is closed for a new one.

uvicorn bounds none of it: its limit_concurrency counts silent connections as work, and answers instead of closing.
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
    H11Protocol = object  # of an extra: `protocol` puts it in

# Files that a process has open beside its connections: weights, the tokenizer, libraries, the listening socket.
_OTHER_FILES = 200


def make_room_for_files(config: ServeConfig) -> None:
    """Raise this process's limit of open files to what its connections need.

    Raises:
        UserError: it may not be as high.
    """
    needed = config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(f"serve.max_connections: found {config.max_connections}, expected at most "
                        f"{hard - _OTHER_FILES}, since a process may open {hard} files here; lower it, or raise "
                        "`ulimit -Hn`")
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Holder(Protocol):
    """A request: bytes that it holds, and can be made to give up."""

    held: int

    def free(self, count: int) -> None: ...


class _Bounded(H11Protocol):
    """What a protocol of uvicorn's over h11 does besides.

    bounds: of the server. waiting: connections that wait for their client, the one that has waited longest first.
    request: what is counted as held by this connection, while there is one.
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
        if self.cycle is not cycle:  # its headers are whole; what reads the body bounds that
            self.cancel_deadline()

    def wait(self) -> None:
        """From now on it is the client's turn: to send a request, or to read the answer."""
        self.waiting.pop(self, None)
        self.waiting[self] = None

    def whole(self) -> None:
        """Its request is whole: it is not closed for another one until its answer is sent."""
        self.waiting.pop(self, None)

    def make_room(self, count: int) -> bool:
        """Close the connection that has waited longest for its client of those that hold so many bytes or more; whether
        there was one. So who sends little is heard, however much others hold."""
        for other in self.waiting:
            if other is not self and other.request is not None and other.request.held >= count:
                other.request.free(other.request.held)
                other.abort()
                return True
        return False

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        if self.transport.is_closing():  # what the client has not read yet must not hold it for ever
            self._deadline = self.loop.call_later(self.bounds.write_seconds, self.abort)
        elif self.cycle is cycle:
            self._wait()
        else:  # the next request was here already
            self.wait()

    def abort(self) -> None:
        """Close at once, whatever is still to be read or written."""
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
        if self.flow is not None:  # else it was refused
            super().connection_lost(error)


def protocol(config: ServeConfig) -> type[asyncio.Protocol]:
    """uvicorn's protocol over h11 with bounds: connections in all, and the time that one may be silent.

    A connection waits for its client from when it is made, or its last answer has gone, until its request is whole, and
    again while its answer is read. When there are as many as may be, the one that has waited longest makes room: so
    those that only hold the door do not keep out others. `scope["state"]["connection"]` is the connection, for what is
    in front of the application.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("Connection", (_Bounded, H11Protocol), {"bounds": config, "waiting": {}})
