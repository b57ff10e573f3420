"""Curves, events, status and heartbeats of a run in an object store, as immutable segments.

A store cannot append, and the cost of sending a growing file again each time would be quadratic in its size. Each start
of a run (attempt) has a folder, `log/ATTEMPT/`. For a file that grows, each object has the bytes added since the object
before, cut at the end of a line or event. For a file that is replaced, each object has the whole file, and the newest
one is valid.
"""

import io
import json
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path

from cloze.launch.run.metrics_file import good_lines, is_evaluation, kept_lines, lines_of
from cloze.launch.run.runs import HEARTBEATS, METRICS, STATUS, TRACKING, heartbeat_name
from cloze.launch.run.store_retries import reading
from cloze.pipeline.bounds import MOST, whole_number
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import inside, publishing
from cloze.pipeline.stores.clients import ADVICE
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.untrusted import load_json

LOG = "log"
START = "start.json"  # the step that an attempt resumes from
_NUMBER = re.compile(r"(.+)\.(\d{6})")
_EVENTS = "*tfevents*"
# An event of TensorBoard: its length (8 bytes, little-endian), a checksum of that (4), the event, its checksum (4).
_EVENT_HEAD, _EVENT_REST = struct.Struct("<Q"), 8
_READERS = 32  # concurrent reads: the segments are small

# The step of a line of metrics.jsonl, and whether it has the figures of an evaluation.
Arrived = tuple[int, bool]


def _whole_events(data: bytes) -> int:
    """Number of bytes of whole events at the beginning of the data."""
    end = 0
    while end + _EVENT_HEAD.size <= len(data):
        after = end + _EVENT_HEAD.size + _EVENT_REST + _EVENT_HEAD.unpack_from(data, end)[0]
        if after > len(data):
            break
        end = after
    return end


def _whole_lines(data: bytes) -> int:
    return data.rfind(b"\n") + 1


class Shipper:
    """Sends a process's curves, status and heartbeat at intervals, in a thread; it tolerates a store that does not
    answer for a while.

    Args:
        folder: folder with the process's files.
        place: folder of the attempt in the store.
        rank: rank of the process.
        seconds: time between two checks for new data.
        warn: called with a line the first time that something could not be sent.
    """

    def __init__(self, folder: Path, place: StorePath, rank: int, seconds: float, warn: Callable[[str], None]) -> None:
        self._folder, self._place, self._seconds, self._warn = folder, place, seconds, warn
        self._whole = (START, STATUS, TRACKING, f"{HEARTBEATS}/{heartbeat_name(rank)}")
        self._sent: dict[str, int] = {}  # bytes sent of files that grow
        self._numbers: dict[str, int] = {}
        self._pieces: dict[str, int] = {}  # keys of the objects of metrics.jsonl, with their sizes
        self._last: dict[str, bytes] = {}  # last content sent of files that are replaced
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def begin(self, step: int, evaluated_step: int, arrived: Iterable[Arrived]) -> None:
        """Start sending the curves.

        Args:
            arrived: lines that are in the store already; those that this start keeps are not sent again.
        """
        last = {False: step, True: evaluated_step}
        count, path = sum(each <= last[evaluated] for each, evaluated in arrived), self._folder / METRICS
        with self._sending, open(path, "rb") if path.exists() else io.BytesIO() as file:
            self._sent[METRICS] = sum(map(len, islice(file, count)))
        (self._folder / START).write_text(json.dumps({"step": step, "evaluated_step": evaluated_step}))

    def ship(self) -> None:
        """Send new data now.

        Raises:
            UserError: the store can't be used, or a file can't be read.
        """
        with self._sending:
            for name in self._whole:
                self._ship_whole(name)
            if METRICS in self._sent:
                self._ship_growth(METRICS, _whole_lines)
            for name in sorted(path.name for path in self._folder.glob(_EVENTS)):
                self._ship_growth(name, _whole_events)

    def close(self, seconds: float) -> None:
        """Send the remaining data, for at most `seconds`."""
        self._ended.set()
        self._thread.join(seconds)

    def num_lost(self, earlier: Mapping[str, int]) -> int:
        """How many pieces of metrics.jsonl are not in the store any more as they were sent.

        Args:
            earlier: those of earlier starts (`LogReader.pieces`).
        """
        sent = {**earlier, **self._pieces}  # before the look: more is sent meanwhile
        there = {each.key: each.size for each in self._place.parent.objects()}
        return sum(there.get(key) != size for key, size in sent.items())

    def _ship_whole(self, name: str) -> None:
        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return
        if data != self._last.get(name):
            number = self._send(name, data)
            self._last[name] = data
            if number > 1:  # the previous object stays for readers that have just listed it
                with suppress(UserError):  # who writes there may have no right to delete
                    (self._place / f"{name}.{number - 2:06d}").unlink()

    def _ship_growth(self, name: str, whole: Callable[[bytes], int]) -> None:
        begin, path = self._sent.get(name, 0), self._folder / name
        with reading(path, self._folder), open(path, "rb") as file:
            file.seek(begin)
            data = file.read()
        if end := whole(data):
            self._send(name, data[:end])
            self._sent[name] = begin + end

    def _send(self, name: str, data: bytes) -> int:
        number = self._numbers.get(name, 0)
        target = self._place / f"{name}.{number:06d}"
        target.write(data)
        self._numbers[name] = number + 1
        if name == METRICS:
            self._pieces[target.key] = len(data)
        return number

    def _work(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._seconds)
            try:
                self.ship()
                self._warned = False
            except (UserError, OSError) as error:
                if not self._warned:
                    self._warned = True
                    self._warn(
                        "the run's curves and status could not be uploaded to the store; the run continues, and "
                        f"they are sent when it answers ({str(error).removesuffix(ADVICE)})"
                    )


def send_rest(folder: Path, log: StorePath, attempt: str) -> None:
    """Send the unsent TensorBoard events of a killed start from its folder on this machine. Its lines of metrics.jsonl
    are sent by the next start (`add_unsent`).

    Raises:
        UserError: the store can't be used.
    """
    pieces: dict[str, list[int]] = {}
    place = log / attempt
    for piece in place.objects():
        if named := _NUMBER.fullmatch(piece.key[len(place.key) + 1 :]):
            pieces.setdefault(named[1], []).append(piece.size)
    for path in sorted(folder.glob(_EVENTS)):
        sizes = pieces.get(path.name, [])
        with open(path, "rb") as file:
            file.seek(sum(sizes))
            data = file.read()
        if end := _whole_events(data):
            (place / f"{path.name}.{len(sizes):06d}").write(data[:end])


def add_unsent(path: Path, before: Iterable[Fields]) -> list[Arrived]:
    """Append to a metrics.jsonl, as it is in the store, the lines that an earlier start on this machine did not send
    before it was killed: a run that resumes from this machine's scratch may resume after them. One line at a time is in
    memory.

    Args:
        before: lines of the earlier start.

    Returns:
        The lines that are in the store.
    """
    arrived = [(line["step"], is_evaluation(line)) for line in _lines_in(path)]
    last, known = arrived[-1][0] if arrived else 0, set(arrived)
    unsent = (line for line in before if line["step"] >= last and (line["step"], is_evaluation(line)) not in known)
    first = next(unsent, None)
    if first is not None:
        with publishing(path, durable=False) as aside, open(aside, "wb") as target:
            target.writelines(map(_encoded, chain(_lines_in(path), [first], unsent)))
    return arrived


def _lines_in(path: Path) -> Iterator[Fields]:
    """The lines of a metrics.jsonl except damaged ones, one at a time; none where there is no file."""
    with open(path, "rb") if path.exists() else io.BytesIO() as file:
        yield from good_lines(file)


def _encoded(line: Fields) -> bytes:
    return (json.dumps(line) + "\n").encode()


def _segments(place: StorePath) -> dict[str, dict[str, list[str]]]:
    """Keys of all segments in order: by attempt, by file."""
    keys: dict[str, dict[str, list[str]]] = {}
    start = len((place / LOG).key) + 1
    for segment in (place / LOG).objects():
        attempt, _, rest = segment.key[start:].partition("/")
        if named := _NUMBER.fullmatch(rest):
            keys.setdefault(attempt, {}).setdefault(named[1], []).append(segment.key)
    return {attempt: keys[attempt] for attempt in sorted(keys)}


def newest_attempt(log: StorePath) -> int:
    """The number of the newest start that has sent anything; 0: there is none."""
    numbers = (whole_number(path.name.partition("-")[0]) for path in log.iterdir())
    return max((number for number in numbers if number is not None), default=0)


class LogReader:
    """Files of a run, joined from their segments in the store; each segment is read once.

    Args:
        place: place of the run.
        newest_pieces: how many of the newest segments of metrics.jsonl the first call reads; None: all.
    """

    def __init__(self, place: StorePath, newest_pieces: int | None = None) -> None:
        self._place, self._newest = place, newest_pieces
        self._first: str | None = None  # the oldest segment that is read
        self._texts = tempfile.TemporaryFile()  # the segments of metrics.jsonl: a long run's would fill the memory
        self._places: dict[str, tuple[int, int]] = {}  # key -> where its segment begins there, and its size
        self._events: set[str] = set()  # keys of the event segments that are written already

    @property
    def pieces(self) -> dict[str, int]:
        """Keys of the segments of metrics.jsonl that were read, with their sizes."""
        return {key: size for key, (_, size) in self._places.items()}

    def write(self, folder: Path, names: Iterable[str] = (METRICS, STATUS, TRACKING)) -> None:
        """Write files into a folder of this machine; in metrics.jsonl the lines of later attempts replace those of the
        same steps.

        Raises:
            UserError: the store can't be used.
        """
        attempts = _segments(self._place)
        for name in names:
            if name == METRICS:
                self._write_metrics(attempts, folder)
            else:
                _fetch_newest(self._place, attempts, name, folder)

    def write_events(self, folder: Path) -> None:
        """Append the events since the last call to TensorBoard's event files in a folder. The files sort by attempt;
        the first event of each tells TensorBoard which earlier events to drop.

        Raises:
            UserError: the store can't be used.
            OSError: the folder can't be written.
        """
        for attempt, files in _segments(self._place).items():
            for name, keys in files.items():
                if not fnmatch(name, _EVENTS):
                    continue
                new = [key for key in keys if key not in self._events]
                target = inside(folder, f"events.out.tfevents.{attempt}.{name.rpartition('tfevents.')[2]}")
                with open(target, "ab" if new != keys else "wb") as file:
                    for _, data in self._read(new):
                        file.write(data)
                self._events.update(new)

    def _write_metrics(self, attempts: dict[str, dict[str, list[str]]], folder: Path) -> None:
        keys = [key for files in attempts.values() for key in files.get(METRICS, ())]
        if self._first is None and keys:
            self._first = keys[-min(self._newest or len(keys), len(keys))]
        for key, data in self._read(
            [each for each in keys if each >= (self._first or "") and each not in self._places]
        ):
            self._places[key] = self._texts.seek(0, io.SEEK_END), len(data)
            self._texts.write(data)
        if self._places:
            with publishing(folder / METRICS, durable=False) as aside, open(aside, "wb") as target:
                target.writelines(map(_encoded, self._lines(attempts)))

    def _read(self, keys: list[str]) -> Iterator[tuple[str, bytes]]:
        """Keys and contents of segments, a few of which are in memory."""
        with ThreadPoolExecutor(_READERS) as readers:
            for first in range(0, len(keys), _READERS):
                some = keys[first : first + _READERS]
                yield from zip(some, readers.map(lambda key: self._place.at(key).read_bytes(), some), strict=True)

    def _lines(self, attempts: dict[str, dict[str, list[str]]]) -> Iterator[Fields]:
        """The lines of all attempts that no later one has replaced; one segment at a time is in memory."""
        begun = [
            _read_start(self._place.at(files[START][-1])) if START in files else (MOST, MOST)
            for files in attempts.values()
        ]
        for number, files in enumerate(attempts.values(), 1):
            later = begun[number:]
            step = min((step for step, _ in later), default=MOST)
            evaluated_step = min((evaluated for _, evaluated in later), default=MOST)
            for key in files.get(METRICS, ()):
                if key in self._places:
                    start, size = self._places[key]
                    self._texts.seek(start)
                    yield from kept_lines(lines_of(self._texts.read(size)), step, evaluated_step)


def _read_start(path: StorePath) -> tuple[int, int]:
    """The step that an attempt resumes from, and that of the last evaluation before it."""
    data = path.read_bytes()
    try:
        start = load_json(data)
        step, evaluated_step = start["step"], start["evaluated_step"]
    except (ValueError, KeyError, TypeError):
        step = evaluated_step = None
    if type(step) is not int or type(evaluated_step) is not int:
        raise UserError(
            f"{path}: found no step from which the run went on, expected the one that `cloze pretrain` wrote; restore "
            "it, or remove it to see the curves of all attempts"
        )
    return step, evaluated_step


def fetch_heartbeats(place: StorePath, folder: Path) -> None:
    """Write the newest heartbeats of the newest attempt as files.

    Raises:
        UserError: the store can't be used.
    """
    for files in list(_segments(place).values())[-1:]:
        for name in files:
            if name.startswith(f"{HEARTBEATS}/"):
                _fetch_newest(place, {"": files}, name, folder)


def _fetch_newest(place: StorePath, attempts: dict[str, dict[str, list[str]]], name: str, folder: Path) -> None:
    for files in reversed(attempts.values()):
        for key in reversed(files.get(name, ())):
            try:
                data = place.at(key).read_bytes()
            except FileNotFoundError:  # deleted since it was listed, as there is a newer one
                continue
            path = inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return
