"""Input files, opened and cut into blocks."""

import os
import re
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import IO

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.readers import compression
from cloze.pipeline.storage import describe
from cloze.pipeline.stores.places import StorePath, is_url, to_place

BLOCK_BYTES = 1 << 20
NEWLINE = re.compile(rb"\n")  # behind which lines end
BLANK_LINES = re.compile(rb"\n[ \t\r]*\n")  # behind which paragraphs end
_BLANK = b" \t\r"  # what a blank line may have
_WHITE = _BLANK + b"\n"  # all that JSON has
ROWS_AT_ONCE = 64  # of a table, since documents may be long,
BYTES_AT_ONCE = 32 << 20  # and the approximate maximum of the bytes of these rows
_NO_STOP = sys.maxsize  # of a file that is not cut into segments
LONGEST_LINE = 16 << 20  # of pairs, which must be held in memory; its arrays take some thirty times as much


def check_parquet_rows(path: str, groups: list[int], whole: int) -> None:
    """Raise UserError unless the row groups of a Parquet file have as many rows as the whole file, all by its footer,
    which no checksum covers.
    """
    if min(groups, default=0) < 0 or sum(groups) != whole:
        raise UserError(
            f"{path}: can't be read as Parquet: found {sum(groups)} rows in its {len(groups)} row groups by its "
            f"footer, expected {whole}, as it says of the file; write it again"
        )


@dataclass(frozen=True)
class InputFile:
    """One input.

    Args:
        number: its place among all inputs.
        source: its place among the weighted sources.
        name: relative to the common folder of its source's files, so that manifests don't depend on the location.
        size: bytes (of a data set: of its text or all of its columns; 0 if unknown).
        rows: of a saved data set, or stream shards of one on the hub.
        changed: when, nanoseconds; 0 on the hub.
        parts: the files of a saved data set.
        content: what that of a store's object is known by; None elsewhere.
        touched: when it was last touched (`last_touched`); 0 of what is not on a disk.
        has_rows: whether positions in it are rows; otherwise they are bytes.
        binary: what kind of file it is instead of text (binary.py); None: it may be text.
    """

    number: int
    source: int
    path: str
    name: str
    format: str
    compression: str | None
    size: int
    changed: int
    config: SourceConfig
    rows: int = 0
    parts: tuple[str, ...] = ()
    content: str | None = None
    touched: int = 0
    has_rows: bool = False
    binary: str | None = None

    @property
    def state(self) -> int | str:
        """A value that changes with the content, besides the size."""
        return self.changed if self.content is None else self.content

    @property
    def is_small(self) -> bool:
        """Whether it is a local file of at most one block."""
        return self.size <= BLOCK_BYTES and self.compression is None and not self.has_rows and not is_url(self.path)


@dataclass(frozen=True)
class Segment:
    """A piece of a file: bytes [start, stop) of a plain one, every stop-th block from start on of a compressed one, row
    groups or rows [start, stop) of a table.

    Args:
        weight: bytes, for grouping and progress.
    """

    file: InputFile
    start: int
    stop: int
    weight: int

    @property
    def stops_at_errors(self) -> bool:
        """Whether bytes that are no text are an error; else they are replaced."""
        return self.file.config.encoding_errors == "stop"


@dataclass
class Block:
    """Bytes of whole lines or documents.

    Args:
        offset: offset of its first byte in the (decompressed) file.
        piece: not 0 if the first document began in an earlier block.
        goes_on: whether the last one continues in the next.
    """

    offset: int
    data: bytes
    piece: int = 0
    goes_on: bool = False


def last_touched(path: str, status: os.stat_result) -> int:
    """When a file, or the link to it, was last written, replaced or renamed, in nanoseconds: the ctime, which nobody
    can set; the time of change (mtime) can be that of a copy's original.
    """
    return max(status.st_ctime_ns, os.lstat(path).st_ctime_ns)


def is_changed(file: InputFile) -> bool:
    """Whether a file is another than when it was listed, by its size and times, in a store by its ETag. False if that
    can't be known: whoever reads a missing file says so.
    """
    try:
        if isinstance(place := to_place(file.path, listed=True), StorePath):
            now = place.stat()
            return (now.st_size, now.content) != (file.size, file.content)
        if not file.touched:  # a data set on the hub
            return False
        states = {path: os.stat(path) for path in file.parts or (file.path,)}
        size = file.size if file.parts else states[file.path].st_size
        changed = max(status.st_mtime_ns for status in states.values())
        touched = max(last_touched(path, status) for path, status in states.items())
    except OSError:
        return False
    return (size, changed, touched) != (file.size, file.changed, file.touched)


def changed_while_read(file: InputFile, advice: str = "run the same command again") -> UserError:
    """The error for a file that changed while it was read."""
    return UserError(f"{file.path}: changed while it was read, expected a file at rest; {advice}")


def open_file(file: InputFile) -> IO[bytes]:
    """Open for reading, decompressed.

    Raises:
        UserError: the file is missing.
    """
    try:
        return compression.open_stream(file.path, file.compression)
    except OSError as error:
        raise UserError(describe(error, file.path)) from error


def _read_exactly(stream: IO[bytes], file: InputFile, count: int) -> bytes:
    """`count` bytes, fewer only at the end, so that block boundaries do not depend on a library's buffering."""
    parts, left = [], count
    try:
        while left and (part := stream.read(left)):
            parts.append(part)
            left -= len(part)
    except compression.ERRORS as error:
        raise UserError(f"{file.path}: can't be read to its end ({error}); restore the file") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def blocks(segment: Segment, separator: re.Pattern[bytes] | None, longest: int | None) -> Iterator[Block]:
    """The blocks of a segment, cut after separators (None: not cut).

    The text between two separators belongs to the segment in which the first one begins. Text longer than `longest`
    bytes is cut at white space into several blocks (None: it must fit into 16 MB). The blocks of one stripe of a
    compressed file hold whole documents: pieces of one document stay together.
    """
    file = segment.file
    with open_file(file) as stream:
        if file.compression:
            number = -1
            for block in _Cutter(stream, file, 0, _NO_STOP, separator, longest).blocks():
                number += block.piece <= 1
                if number % segment.stop == segment.start:
                    yield block
        else:
            stop = _NO_STOP if separator is None else segment.stop
            yield from _Cutter(stream, file, segment.start, stop, separator, longest).blocks()


class _Cutter:
    """Cuts a stream into blocks; holds what was read and is in no block yet.

    Args:
        start: offset where the segment begins.
        stop: offset where it ends; a document that began before is read to its end.
        separator: as of `blocks`.
        longest: as of `blocks`.
    """

    def __init__(
        self,
        stream: IO[bytes],
        file: InputFile,
        start: int,
        stop: int,
        separator: re.Pattern[bytes] | None,
        longest: int | None,
    ) -> None:
        self._stream, self._file = stream, file
        self._stop, self._separator, self._longest = stop, separator, longest
        self._data, self._begin = b"", start  # what is held, and the offset of its first byte
        self._pieces = 0  # how many blocks have a part of the first document that is held
        # Where the last newline is behind which only blank was read, if a document was cut behind it.
        self._unfinished = -1

    def blocks(self) -> Iterator[Block]:
        """The blocks of the segment."""
        if self._begin and not self._skip_to_own_first_document():
            return
        more = True
        while more:
            if (yield from self._end_unfinished_document()) or (yield from self._cut_whole_documents()):
                return
            yield from self._cut_long_document()
            more = self._read_more()
        if self._data:
            yield self._take(len(self._data))

    def _read(self, count: int) -> bool:
        """Hold up to `count` bytes more; whether there were any."""
        new = _read_exactly(self._stream, self._file, count)
        self._data += new
        return bool(new)

    def _read_more(self) -> bool:
        # A long line is read in doubling steps: equal steps would copy it many times.
        return self._read(max(BLOCK_BYTES, len(self._data) if self._longest is None else 0))

    def _drop(self, cut: int) -> None:
        self._data, self._begin = self._data[cut:], self._begin + cut

    def _take(self, cut: int) -> Block:
        """The first `cut` bytes, which end with a document, as a block; the rest is held."""
        block = Block(self._begin, self._data[:cut], self._pieces + 1 if self._pieces else 0)
        self._drop(cut)
        self._pieces = 0
        return block

    @property
    def _is_past_stop(self) -> bool:
        return self._begin + len(self._data) > self._stop

    @property
    def _place_of_stop(self) -> int:
        """Where in what is held the segment ends."""
        return max(0, self._stop - self._begin)

    def _skip_to_own_first_document(self) -> bool:
        """Read the separator before the segment's first document; False: there is none of its own."""
        assert self._separator is not None, "a file is cut into segments at separators"
        self._stream.seek(self._begin)
        while self._read(BLOCK_BYTES):
            match = self._separator.search(self._data)
            if match is None and not self._data[self._place_of_stop :].strip():
                continue
            if match is None or self._begin + match.start() >= self._stop:
                return False  # the whole segment is inside a document of an earlier segment
            # Keep the last newline: it may begin the separator at which this segment ends.
            self._drop(match.end() - 1)
            return True
        return False

    def _end_unfinished_document(self) -> Generator[Block, None, bool]:
        """End a document that was cut in white space if that turns out to be a blank line; whether the segment ends."""
        newline = self._unfinished
        if newline < 0 or not (rest := self._data.lstrip(_BLANK)):
            return False
        self._unfinished = -1
        if not rest.startswith(b"\n"):
            return False
        yield self._take(len(self._data) - len(rest))  # its newline is kept as above
        return newline >= self._stop

    def _cut_whole_documents(self) -> Generator[Block, None, bool]:
        """Cut after the separator at which the segment ends, or else after the last one; whether the segment ends."""
        if self._separator and self._is_past_stop and (end := self._separator.search(self._data, self._place_of_stop)):
            yield self._take(end.end())
            return True
        # White space at the end may begin the separator at which this segment ends, if that is more than a newline.
        strips = self._is_past_stop and self._separator is BLANK_LINES
        if cut := _cut(self._data.rstrip() if strips else self._data, self._separator):
            yield self._take(cut)
        return False

    def _cut_long_document(self) -> Iterator[Block]:
        """Cut a document that is too long into pieces.

        Raises:
            UserError: it is a line that must be held as a whole.
        """
        if self._longest is None:
            if len(self._data) > LONGEST_LINE:
                raise UserError(
                    f"{self._file.path}: a line from byte {self._begin} on is longer than {LONGEST_LINE >> 20} MB, the "
                    "most that is held in memory; store this text as plain text, or divide it"
                )
            return
        most = self._longest + BLOCK_BYTES
        if len(self._data) <= most:
            return
        if self._is_past_stop and (cut := _cut(self._data, self._separator)):  # in the white space at the end
            # Without the newline that may begin another one.
            yield self._take(cut - (self._begin + cut > self._stop))
        if self._separator is BLANK_LINES and (newline := _unfinished(self._data)) >= 0:
            self._unfinished = self._begin + newline
        # Text is cut between words. A blank line can be longer than what is held: it ends a document all the same.
        while len(self._data) > most:
            cut = self._longest if self._separator is NEWLINE else cut_place(self._data, self._longest)
            if self._pieces or self._data[:cut].strip(_WHITE):  # white space before a document is none of it
                self._pieces += 1
                yield Block(self._begin, self._data[:cut], self._pieces, goes_on=True)
            self._drop(cut)
        if self._unfinished >= self._begin:
            self._unfinished = -1  # nothing was cut behind it


def _cut(data: bytes, separator: re.Pattern[bytes] | None) -> int:
    """End of the last separator; 0 if there is none."""
    if separator is None:
        return 0
    reach = 1 << 12  # a separator is near the end, as a rule: search there first
    while True:
        low = max(0, len(data) - reach)
        last = 0
        for match in separator.finditer(data, low):
            last = match.end()
        if last or low == 0:
            return last
        reach *= 8


def _unfinished(data: bytes) -> int:
    """Place of the newline that begins a blank line whose end is not in `data`; -1 if there is none."""
    newline = len(data.rstrip(_BLANK)) - 1
    return newline if data[newline : newline + 1] == b"\n" else -1


def cut_place(data: bytes, limit: int) -> int:
    """A place to cut at or before `limit`: after white space if there is any near, else between characters."""
    for place in range(limit, max(limit - 4096, 1), -1):
        if data[place - 1] <= 0x20:
            return place
    return between_characters(data, limit)


def between_characters(data: bytes, place: int) -> int:
    """`place`, or the first byte of the UTF-8 character that contains it."""
    for first in range(place, max(place - 4, 0), -1):
        if data[first] & 0xC0 != 0x80:
            return first
    return place  # not UTF-8: any place


def checked_name(name: str) -> str:
    """A name that the manifest can hold.

    Raises:
        UserError: for one that isn't UTF-8: names are bytes to the system.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise UserError(f"input: found the name '{shown}', expected one in UTF-8; rename the file") from error
    return name
