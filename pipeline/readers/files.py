"""Find input files, open them (the one place that knows about compression), and cut them into blocks."""

import glob
import lzma
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import describe

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
BLOCK_BYTES = 1 << 20
NEWLINE = re.compile(rb"\n")  # behind which lines end
LONGEST_LINE = 16 << 20  # of pairs, which must be held whole: its arrays take some thirty times as much


@dataclass(frozen=True)
class InputFile:
    """One input. number: its place among all inputs; source: its place among the weighted sources.

    name: relative to the folder that its source's files share, so that manifests don't depend on where they lie.
    size: bytes (of a data set: of its text or all of its columns; 0 if unknown). rows: of a saved data set, or stream
    shards of one on the hub. changed: when, nanoseconds; 0 on the hub. parts: the files of a saved data set.
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


@dataclass(frozen=True)
class Segment:
    """A piece of a file: bytes [start, stop) of a plain one, every stop-th block from start on of a compressed one,
    row groups or rows [start, stop) of a table. weight: bytes, for grouping and progress."""

    file: InputFile
    start: int
    stop: int
    weight: int


@dataclass
class Block:
    """Bytes of whole lines or documents. offset: of its first byte in the (decompressed) file. piece: not 0 if the
    first document began in an earlier block; goes_on: if the last one goes on in the next."""

    offset: int
    data: bytes
    piece: int = 0
    goes_on: bool = False


def find_files(
    entries: list[str], source: int, config: SourceConfig, first: int, written: list[str]
) -> list[InputFile]:
    """Files of a source in the order of their names; the order of the entries doesn't matter.

    What lies in a folder of `written` is left out, unless an entry names a place in it.
    """
    paths: set[str] = set()
    for entry in entries:
        found = _expand(entry, [os.path.realpath(folder) for folder in written])
        if not found:
            raise UserError(
                f"input: found nothing at {entry!r}, expected a file, a folder with files, or a glob; check the path"
            )
        paths.update(found)
    # One file under several names is read once. A link says what it links to by its own name: that of its target may
    # be a hash (the cache of the Hugging Face hub, DVC, git-annex).
    ordered = sorted({os.path.realpath(path): path for path in sorted(paths, reverse=True)}.values())
    shared = os.path.commonpath([os.path.dirname(path) for path in ordered])
    files = []
    for number, path in enumerate(ordered, first):
        suffixes = [suffix.lower() for suffix in Path(path).suffixes]
        compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
        kind = suffixes[-2:-1] if compression else suffixes[-1:]
        form = config.format
        if form == "auto":
            form = _FORMATS.get(kind[0], "text") if kind else "text"
        status = os.stat(path)
        files.append(
            InputFile(number, source, path, os.path.relpath(path, shared).replace(os.sep, "/"), form, compression,
                      status.st_size, status.st_mtime_ns, config)
        )
    if not any(file.size for file in files):
        raise UserError(f"input: found only empty files at {', '.join(entries)}, expected text")
    return files


def _expand(entry: str, written: list[str]) -> list[str]:
    """The files that an entry names, their folders without links."""
    path = Path(entry).expanduser()
    written = [folder for folder in written if not Path(os.path.realpath(path)).is_relative_to(folder)]
    places = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
    listed = [file for place in places for file in (_visible(place) if place.is_dir() else [place])]
    found = [file.parent.resolve() / file.name for file in listed if file.is_file()]
    return [str(file) for file in found if not any(file.is_relative_to(folder) for folder in written)]


def _visible(folder: Path) -> list[Path]:
    """Everything below a folder but what is hidden or lies in a hidden folder."""
    found = folder.rglob("*")
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def open_file(file: InputFile) -> IO[bytes]:
    """Open for reading, decompressed. Raises UserError if it isn't there any more."""
    try:
        if file.compression == "xz":
            return lzma.open(file.path, "rb")
        if file.compression:
            return pa.input_stream(file.path, compression=file.compression)
        return open(file.path, "rb", buffering=0)
    except OSError as error:
        raise UserError(describe(error, Path(file.path))) from error


def _read_exactly(stream: IO[bytes], file: InputFile, count: int) -> bytes:
    """`count` bytes, fewer only at the end: where blocks are cut must not depend on how a library buffers."""
    parts, left = [], count
    try:
        while left and (part := stream.read(left)):
            parts.append(part)
            left -= len(part)
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        raise UserError(f"{file.path}: can't be read to its end ({error}); restore the file") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def blocks(segment: Segment, separator: re.Pattern | None, longest: int | None) -> Iterator[Block]:
    """The blocks of a segment, cut behind a separator (None: nowhere).

    The text between two separators belongs to the segment in which the earlier one begins. What is longer than
    `longest` bytes is cut at white space and comes in several blocks (None: it must fit into 16 MB).
    The blocks of one stripe of a compressed file hold whole documents: pieces of one stay together.
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
    separator: re.Pattern | None,
    longest: int | None,
) -> Iterator[Block]:
    data, begin, pieces = b"", start, 0
    waiting = start > 0  # for the separator behind which this segment's first document begins
    if waiting:
        stream.seek(start)
    while True:
        # A long line is read in doubling steps: adding up equal ones would copy it many times.
        doubling = longest is None and not waiting
        new = _read_exactly(stream, file, max(BLOCK_BYTES, len(data) if doubling else 0))
        if not new:
            break
        data += new
        if waiting:
            match = separator.search(data)
            if match is None and not data[max(0, stop - begin) :].strip():
                continue
            if match is None or begin + match.start() >= stop:
                return  # one document covers this segment: it belongs to an earlier one
            # The last newline stays: it may begin the separator at which this segment ends.
            data, begin, waiting = data[match.end() - 1 :], begin + match.end() - 1, False
        last = separator is not None and stop is not None and begin + len(data) > stop
        end = separator.search(data, max(0, stop - begin)) if last else None
        # White space at the end may begin the separator at which this segment ends.
        if cut := end.end() if end else _cut(data.rstrip() if last else data, separator):
            yield Block(begin, data[:cut], pieces + 1 if pieces else 0)
            data, begin, pieces = data[cut:], begin + cut, 0
            if end:
                return
        while longest is not None and len(data) > longest + BLOCK_BYTES:
            cut = longest if separator is NEWLINE else cut_place(data, longest)  # text is cut between words
            pieces += 1
            yield Block(begin, data[:cut], pieces, goes_on=True)
            data, begin = data[cut:], begin + cut
        if longest is None and len(data) > LONGEST_LINE:
            raise UserError(
                f"{file.path}: a line from byte {begin} on is longer than {LONGEST_LINE >> 20} MB, the most that is "
                "held in memory; store this text as plain text, or divide it"
            )
    if data and not waiting:
        yield Block(begin, data, pieces + 1 if pieces else 0)


def _cut(data: bytes, separator: re.Pattern | None) -> int:
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


def cut_place(data: bytes, limit: int) -> int:
    """A place to cut at or before `limit`: behind white space if there is any near, else between characters."""
    for place in range(limit, max(limit - 4096, 1), -1):
        if data[place - 1] <= 0x20:
            return place
    return between_characters(data, limit)


def between_characters(data: bytes, place: int) -> int:
    """`place`, or the first byte of the UTF-8 character that lies across it."""
    for first in range(place, max(place - 4, 0), -1):
        if data[first] & 0xC0 != 0x80:
            return first
    return place  # no UTF-8: wherever it is cut
