"""Bounds on connections."""

import asyncio
import itertools
import resource
import socket
from collections.abc import Callable
from unittest import mock

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from cloze.launch.serve import connections
from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.connections import Listener, make_room_for_files, protocol
from cloze.pipeline.errors import UserError
from tests.launch.serve.hostile_requests import chunked


def test_more_connections_than_files_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    make_room_for_files(ServeConfig("model", max_connections=3896))
    with pytest.raises(UserError, match="expected at most 3896, since a process may open 4096 files"):
        make_room_for_files(ServeConfig("model", max_connections=3897))


def test_answers_do_not_wait_for_acknowledgements():
    """Each request of a connection after the first took 44 ms."""

    async def nodelay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport):
                found.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listener = Listener(socket.create_server(("127.0.0.1", 0)), ServeConfig("model"))
        async with await asyncio.get_running_loop().create_server(Protocol, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await found

    assert asyncio.run(nodelay())


@pytest.mark.parametrize(
    "content, slow",
    [
        (chunked(b" " * 1_000_000, 1 << 14), False),
        (chunked(b" " * 1_000_000, 1 << 10), False),
        (chunked(b" " * 1_000_000, 200), True),
        (chunked(b" " * 5000, 1, b";" + b"x" * 200), True),
        (chunked(b" " * 100_000), True),
    ],
)
def test_a_body_in_small_chunks_is_parsed_in_the_time_of_its_kind(monkeypatch, content, slow):
    """By a clock that takes 6 us for an event, half of what was measured for h11 and uvicorn together: forty clients
    with chunks of 200 bytes had all of the event loop's time.
    """
    clock = itertools.count(step=6e-6)
    monkeypatch.setattr(connections.time, "thread_time", lambda: next(clock))

    async def app(scope, receive, send):
        await asyncio.Event().wait()

    async def feed() -> bool:
        made = protocol(ServeConfig("model"))
        connection = made(config=Config(app), server_state=ServerState(), app_state={})
        transport = mock.Mock(spec=asyncio.Transport)
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = None
        connection.connection_made(transport)
        rest = content
        while rest and connection not in made.lane:
            piece, rest = rest[: len(made.buffer)], rest[len(made.buffer) :]
            made.buffer[: len(piece)] = piece
            connection.buffer_updated(len(piece))
        found = connection in made.lane
        connection.connection_lost(None)
        for task in connection.tasks:
            task.cancel()
        return found

    assert asyncio.run(feed()) == slow


class Waiting:
    """What the lane sees of a connection: one that needs so many turns."""

    def __init__(self, lane: connections._Lane, name: str, needs: int, after: Callable[[str], None]) -> None:
        self.lane, self.name, self.needs, self.after = lane, name, needs, after
        self.slices, self.loop = 0, asyncio.get_running_loop()
        lane.join(self, 0)

    def take_turn(self) -> float:
        self.slices += 1
        if self.slices < self.needs:
            self.lane.join(self, 0)
        self.after(self.name)
        return 0.001


def test_an_ordinary_request_in_the_lane_waits_for_one_turn(monkeypatch):
    """Behind forty connections that send short lines without end it waited for a turn of each, again and again."""
    monkeypatch.setattr(connections, "_REST", 0)
    order, lane = [], connections._Lane()

    def after(name: str) -> None:
        order.append(name)
        if len(order) == 45:
            Waiting(lane, "ordinary", 1, after)

    async def run() -> None:
        for number in range(40):
            Waiting(lane, f"long {number}", 3, after)
        while len(order) < 121:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert order.index("ordinary") == 45
    assert order[:40] == [f"long {number}" for number in range(40)] and len(set(order)) == 41


def test_the_lane_has_turns_however_long_those_took_that_joined_it():
    """50 heads of 3,000 lines a second made it wait for half a minute, and an ordinary request in it with them."""
    order, lane = [], connections._Lane()

    async def run() -> None:
        Waiting(lane, "ordinary", 1, order.append)
        while not order:
            lane.join(Waiting(lane, "long", 1, order.append), 60)
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert order[0] == "ordinary"


def test_a_request_of_several_turns_does_not_wait_for_all_newcomers(monkeypatch):
    """Each turn brings another connection, which has had fewer."""
    monkeypatch.setattr(connections, "_REST", 0)
    order, lane = [], connections._Lane()

    def after(name: str) -> None:
        order.append(name)
        if name == "new":
            Waiting(lane, "new", 1, after)

    async def run() -> None:
        Waiting(lane, "honest", 3, after)
        for _ in range(5):
            Waiting(lane, "new", 1, after)
        while len(order) < 100:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    turns = [place for place, name in enumerate(order) if name == "honest"]
    assert len(turns) == 3 and turns[-1] <= 2 * 4 * 6 + 2, turns


def test_a_connection_is_not_charged_for_its_earlier_requests(monkeypatch):
    """That of a proxy waited 29 s behind ten newcomers, after one slow request of somebody."""
    monkeypatch.setattr(connections, "_REST", 0)
    clock = itertools.count(step=6e-6)
    monkeypatch.setattr(connections.time, "thread_time", lambda: next(clock))
    had: list[int] = []

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        had.append(scope["app"].slices)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def answered() -> list[int]:
        made = protocol(ServeConfig("model"))
        connection = made(config=Config(app), server_state=ServerState(), app_state={})

        async def with_connection(scope, receive, send):
            await app({**scope, "app": connection}, receive, send)

        connection.app = with_connection
        transport = mock.Mock(spec=asyncio.Transport)
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = None
        connection.connection_made(transport)
        found = []
        for number in range(2):
            rest = chunked(b" " * 20_000)
            while rest or len(had) == number:
                if connection not in made.lane and rest:
                    piece, rest = rest[: len(made.buffer)], rest[len(made.buffer) :]
                    made.buffer[: len(piece)] = piece
                    connection.buffer_updated(len(piece))
                await asyncio.sleep(0)
            found.append(connection.slices)
        connection.connection_lost(None)
        return found

    after = asyncio.run(asyncio.wait_for(answered(), 30))
    assert min(had) > 2 and after == [0, 0]


def test_requests_are_read_no_faster_than_they_are_answered(monkeypatch):
    """Sent ahead without end: uvicorn reads a piece more during each answer, and these filled the memory."""
    monkeypatch.setattr(connections.time, "thread_time", lambda: 0.0)  # none is slow
    request = b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 500 + b"\r\n\r\n"
    count, answered, most = 2000, 0, 0
    rest, reading = request * count, True

    def change(to: bool) -> None:
        nonlocal reading
        reading = to

    async def app(scope, receive, send):
        nonlocal answered
        await receive()
        leaving = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        answered += 1
        leaving.cancel()

    async def feed() -> None:
        nonlocal rest, most
        made = protocol(ServeConfig("model"))
        connection = made(config=Config(app), server_state=ServerState(), app_state={})
        transport = mock.Mock(spec=asyncio.Transport)
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = None
        transport.pause_reading.side_effect = lambda: change(False)
        transport.resume_reading.side_effect = lambda: change(True)
        connection.connection_made(transport)
        while answered < count:
            if rest and reading:
                piece, rest = rest[: len(made.buffer)], rest[len(made.buffer) :]
                made.buffer[: len(piece)] = piece
                connection.buffer_updated(len(piece))
            most = max(most, len(connection.conn.trailing_data[0]))
            await asyncio.sleep(0)
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(feed(), 60))
    assert connections._AHEAD_BYTES <= most < 2 * connections._AHEAD_BYTES < len(request) * count
