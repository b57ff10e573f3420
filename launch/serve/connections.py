"""Limits on connections: their number, how long they may be idle, which one is closed for a new one, and the time that
parsing may take.

uvicorn has no such limits: its limit_concurrency counts idle connections as active, and responds instead of closing; it
accepts 2,048 connections before it reads from one, and parses all of a socket's bytes at once, 256 KiB of one-byte
chunks in a second.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from cloze.launch.serve.config import ServeConfig
from cloze.pipeline.errors import UserError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol
else:
    H11Protocol = object  # uvicorn is in an extra: `protocol` sets the base class

# Open files besides the connections: weights, the tokenizer, libraries, the listening socket.
_OTHER_FILES = 200
# Processor time to parse a request and each of its bytes: several times what ordinary ones take. The third is the most
# that a connection may save up, and what it gets at a time in the lane.
_SECONDS_A_REQUEST = 0.001
_SECONDS_A_BYTE = 0.01 / (1 << 20)
_SLICE_SECONDS = 0.005
# Bytes read from a connection at a time, before others are read from: 256 KiB of short lines take h11 0.2 s at once.
_PIECE_BYTES = 1 << 14
# Bytes that a client has sent ahead and that are not parsed yet, from which on none are read: twice what uvicorn takes
# of a head that is not complete.
_AHEAD_BYTES = 1 << 17
# The share of the connections that are accepted at a time: one that has sent its request is read from before so many
# others have come that it is the longest waiting.
_ACCEPTED_SHARE = 1 / 16
# How much longer than a turn took the lane waits after it: connections in the lane get a tenth of the time together.
# And how long it waits at most for what others took before they joined it: without that it waited ever longer, and an
# ordinary request in it with them.
_REST = 9
_LONGEST_REST_SECONDS = 0.1
# Lines of a head, or of what follows a chunked body: twice Apache's limit. h11 parses them at once, 3,000 in 20 ms.
_MOST_LINES = 200
# So many turns for each connection in the lane, and the one that has waited longest is next, whatever it has had: not
# measured; it bounds what a request of a few slices waits for newcomers, which come first.
_ROUNDS = 4


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


class Listener(socket.socket):
    """A listening socket that gives a few of its connections, and then seems to have no more once: asyncio stops at
    that until it has looked at other sockets.
    """

    def __init__(self, bound: socket.socket, config: ServeConfig) -> None:
        # asyncio sets TCP_NODELAY only where the protocol is named, and create_server names none. Without it the second
        # part of an answer waits for the client's delayed acknowledgement of the first, 40 ms.
        super().__init__(bound.family, bound.type, socket.IPPROTO_TCP, bound.detach())
        self._most = self._left = max(1, int(config.max_connections * _ACCEPTED_SHARE))

    def accept(self) -> tuple[socket.socket, Any]:
        self._left -= 1
        if self._left < 0:
            self._left = self._most
            raise BlockingIOError
        return super().accept()


class Holder(Protocol):
    """The interface of a request that holds memory: bytes that it holds, and a method to release them."""

    held: int

    def free(self, count: int) -> None: ...


class _Lane:
    """The connections whose bytes took longer to parse than their number allows: they are parsed in turn, a slice each,
    in a tenth of the event loop's time. Whose request has had fewest slices is next: an ordinary one, for which a
    busy machine has taken longer than usual, needs one, and does not wait for those that need hundreds; but none waits
    for more than _ROUNDS turns of each.
    """

    def __init__(self) -> None:
        self._turns: dict[_Bounded, int] = {}  # with the number of turns before it came, in the order of coming
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._free_at = self._since = 0.0

    def __contains__(self, connection: _Bounded) -> bool:
        return connection in self._turns

    def join(self, connection: _Bounded, excess: float) -> None:
        """Add a connection that took `excess` seconds more than it may; the lane rests for them too."""
        now = connection.loop.time()
        if not self._turns:
            self._since = max(self._since, now)
        self._turns[connection] = self._count
        self._free_at = min(max(self._free_at, now) + _REST * excess, self._since + _LONGEST_REST_SECONDS)
        self._plan(connection.loop)

    def leave(self, connection: _Bounded) -> None:
        self._turns.pop(connection, None)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._turns:
            self._timer = loop.call_at(self._free_at, self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._free_at > loop.time():  # others have joined meanwhile
            self._plan(loop)
        elif self._turns:
            first = next(iter(self._turns))
            waits = self._count - self._turns[first] < _ROUNDS * len(self._turns)
            # of several with as few the one that came first
            connection = min(self._turns, key=lambda each: each.slices) if waits else first
            self.leave(connection)
            self._count += 1
            self._since = loop.time()
            self._free_at = self._since + _REST * connection.take_turn()
            self._plan(loop)


class _Bounded(H11Protocol):
    """Mixin for uvicorn's h11 protocol that enforces the limits.

    Args:
        bounds: limits of the server.
        waiting: connections that wait for their client, longest waiting first.
        lane: connections whose bytes take long to parse.
        buffer: what was read last, of any connection.
        request: the current request, whose memory is counted.
    """

    bounds: ServeConfig
    waiting: dict[_Bounded, None]
    lane: _Lane
    buffer: bytearray
    request: Holder | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self._deadline: asyncio.TimerHandle | None = None
        self._credit = _SECONDS_A_REQUEST  # seconds that parsing may take, and what uvicorn does with each event
        self._charged = 0.0  # until when, on this thread's clock
        self._cut = False
        self.slices = 0  # that the lane gave its request
        lines = self.conn._receive_buffer
        lines.maybe_extract_lines = _of_few_lines(lines.maybe_extract_lines)  # type: ignore[method-assign]
        self._next_event: Callable[[], Any] = self.conn.next_event
        self.conn.next_event = self._next_if_paid  # type: ignore[method-assign]

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.bounds.max_connections:
            if not self.waiting:
                self.transport = transport
                transport.abort()
                return
            next(iter(self.waiting)).abort()
        super().connection_made(transport)
        self._resume_reading = self.flow.resume_reading
        self.flow.resume_reading = self._read_if_parsed  # type: ignore[method-assign]
        self._wait()

    def _read_if_parsed(self) -> None:
        """Resume reading, unless the client has sent too many requests ahead. uvicorn resumes it during each answer, to
        see whether the client leaves: who sent requests without end and read no answer filled the memory.
        """
        if len(self.conn.trailing_data[0]) < _AHEAD_BYTES:
            self._resume_reading()

    def _wait(self) -> None:
        self.cancel_deadline()
        self.wait()
        self._deadline = self.loop.call_later(self.bounds.read_seconds, self.abort)

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._earn(nbytes * _SECONDS_A_BYTE)
        self.data_received(bytes(self.buffer[:nbytes]))

    def _earn(self, seconds: float) -> None:
        self._credit = min(self._credit + seconds, _SLICE_SECONDS)

    def _next_if_paid(self) -> Any:
        """The next event of h11; without credit NEED_DATA, at which uvicorn stops."""
        import h11

        self._charge()
        if self._credit <= 0:
            self._cut = True
            return h11.NEED_DATA
        return self._next_event()

    def _charge(self) -> None:
        now = time.thread_time()  # not the clock: the model's threads run as well
        self._credit -= now - self._charged
        self._charged = now

    def take_turn(self) -> float:
        """Parse for one slice, as the first in the lane; returns the seconds that it took."""
        self.slices += 1
        self._credit = _SLICE_SECONDS
        self.handle_events()
        if self not in self.lane and not self.flow.read_paused:
            self.transport.resume_reading()
        return _SLICE_SECONDS - self._credit

    def handle_events(self) -> None:
        if self in self.lane or self.transport.is_closing():
            return
        cycle = self.cycle
        self._cut = False
        self._charged = time.thread_time()
        super().handle_events()
        self._charge()
        if self._cut and not self.transport.is_closing():
            # The lane ends this pause, not uvicorn's flow control; if that needs one too, it pauses again at its turn.
            self.transport.pause_reading()
            self.flow.read_paused = False
            self.lane.join(self, -self._credit)
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
        self.slices = 0
        self._earn(_SECONDS_A_REQUEST)
        super().on_response_complete()
        # a client that does not read the rest must not keep the connection open forever
        if self.transport.is_closing():
            self._deadline = self.loop.call_later(self.bounds.write_seconds, self.abort)
        elif self.cycle is cycle:
            self._wait()
        else:  # the next request has arrived already
            self.wait()

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, for what is no HTTP; but in the middle of an answer no other one can begin."""
        import h11

        if self.cycle is not None:
            self.cycle.disconnected = True  # what its answer sends from now on is left out
        try:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
                return
        except h11.LocalProtocolError:  # an answer to HEAD is over with its headers
            pass
        self.abort()

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
        self.lane.leave(self)
        self.connections.discard(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        if self.flow is not None:  # otherwise the connection was refused
            super().connection_lost(error)


def _of_few_lines(extract: Callable[[], list[bytearray] | None]) -> Callable[[], list[bytearray] | None]:
    """h11's reading of header lines with a limit of their number, which it has not: beyond it the answer is 400."""
    import h11

    def lines() -> list[bytearray] | None:
        found = extract()
        if found is not None and len(found) > _MOST_LINES:
            raise h11.RemoteProtocolError(f"found {len(found)} lines, expected at most {_MOST_LINES}", 431)
        return found

    return lines


def protocol(config: ServeConfig) -> type[asyncio.Protocol]:
    """uvicorn's h11 protocol with limits on the number of connections and on their idle time.

    A connection waits for its client from its beginning, or from the end of its last response, until its request is
    complete, and again while the response is read. At the maximum number of connections the longest waiting one is
    closed for a new one, so idle connections do not keep out others. `scope["state"]["connection"]` is the connection,
    for middleware.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    shared = {"bounds": config, "waiting": {}, "lane": _Lane(), "buffer": bytearray(_PIECE_BYTES)}
    return type("Connection", (_Bounded, H11Protocol, asyncio.BufferedProtocol), shared)
