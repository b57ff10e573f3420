"""Input files, opened and cut into blocks."""

import os
import re
from collections.abc import Iterator
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
LONGEST_LINE = 16 << 20  # of pairs, which must be held in memory; its arrays take some thirty times as much


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
        if isinstance(place := to_place(file.path), StorePath):
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
            for block in _blocks(stream, file, 0, None, separator, longest):
                number += block.piece <= 1
                if number % segment.stop == segment.start:
                    yield block
        else:
            yield from _blocks(stream, file, segment.start, segment.stop, separator, longest)


def _blocks(
    stream: IO[bytes],
    file: InputFile,
    start: int,
    stop: int | None,
    separator: re.Pattern[bytes] | None,
    longest: int | None,
) -> Iterator[Block]:
    data, begin, pieces = b"", start, 0
    unfinished = -1  # where the last newline is behind which only blank was read, if a document was cut behind it
    waiting = start > 0  # read the separator before this segment's first document
    if waiting:
        stream.seek(start)
    while True:
        # A long line is read in doubling steps: equal steps would copy it many times.
        doubling = longest is None and not waiting
        new = _read_exactly(stream, file, max(BLOCK_BYTES, len(data) if doubling else 0))
        if not new:
            break
        data += new
        if waiting:
            assert separator is not None and stop is not None, "a file is cut into segments at separators"
            match = separator.search(data)
            if match is None and not data[max(0, stop - begin) :].strip():
                continue
            if match is None or begin + match.start() >= stop:
                return  # the whole segment is inside a document of an earlier segment
            # Keep the last newline: it may begin the separator at which this segment ends.
            data, begin, waiting = data[match.end() - 1 :], begin + match.end() - 1, False
        if unfinished >= 0 and (rest := data.lstrip(_BLANK)):
            if rest.startswith(b"\n"):  # the document ends; its newline is kept as above
                cut = len(data) - len(rest)
                yield Block(begin, data[:cut], pieces + 1 if pieces else 0)
                if stop is not None and unfinished >= stop:
                    return
                data, begin, pieces = rest, begin + cut, 0
            unfinished = -1
        last, end = False, None
        if separator is not None and stop is not None and begin + len(data) > stop:
            last, end = True, separator.search(data, max(0, stop - begin))
        # White space at the end may begin the separator at which this segment ends, if that is more than a newline.
        whole = data.rstrip() if last and separator is BLANK_LINES else data
        if cut := end.end() if end else _cut(whole, separator):
            yield Block(begin, data[:cut], pieces + 1 if pieces else 0)
            data, begin, pieces = data[cut:], begin + cut, 0
            if end:
                return
        if longest is not None and len(data) > longest + BLOCK_BYTES:
            if last and (cut := _cut(data, separator)):  # in the white space at the end
                assert stop is not None
                cut -= begin + cut > stop  # without the newline that may begin another one
                yield Block(begin, data[:cut], pieces + 1 if pieces else 0)
                data, begin, pieces = data[cut:], begin + cut, 0
            if separator is BLANK_LINES and (newline := _unfinished(data)) >= 0:
                unfinished = begin + newline
        # Text is cut between words. A blank line can be longer than what is held: it ends a document all the same.
        while longest is not None and len(data) > longest + BLOCK_BYTES:
            cut = longest if separator is NEWLINE else cut_place(data, longest)
            if pieces or data[:cut].strip(_WHITE):  # white space before a document is none of it
                pieces += 1
                yield Block(begin, data[:cut], pieces, goes_on=True)
            data, begin = data[cut:], begin + cut
        if unfinished >= begin:
            unfinished = -1  # nothing was cut behind it
        if longest is None and len(data) > LONGEST_LINE:
            raise UserError(
                f"{file.path}: a line from byte {begin} on is longer than {LONGEST_LINE >> 20} MB, the most that is "
                "held in memory; store this text as plain text, or divide it"
            )
    if data and not waiting:
        yield Block(begin, data, pieces + 1 if pieces else 0)


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
