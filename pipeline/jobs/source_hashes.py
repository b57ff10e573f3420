"""Hashes of the input files for the manifest, computed piece by piece by the tasks that read them.

A file read by one task is hashed as a whole. A file read by several tasks is hashed in as many pieces of equal size
(the last may be smaller), and its hash is the hash of theirs: nothing is read twice, and no task's work grows with the
file.
"""

import hashlib
import itertools
import os
from array import array

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.readers.files import InputFile, Segment, changed_while_read, last_touched
from cloze.pipeline.storage import describe
from cloze.pipeline.stores.places import StorePath, to_place
from cloze.pipeline.stores.reading import open_raw

_AT_ONCE = 1 << 20  # bytes
_DIGEST_BYTES = 32


def is_hashed(file: InputFile) -> bool:
    """Whether an input is hashed. Data sets on the hub have no local files; they are identified by their commit."""
    return file.format != "dataset" or bool(file.parts)


def read_small(file: InputFile, start: int, stop: int) -> tuple[bytes, str] | None:
    """Bytes and SHA-256 (hexadecimal) of a small file, opened and read once.

    None if it isn't small, or [start, stop) isn't the whole file: then read it, and call `hash_piece`.

    Raises:
        UserError: the file has changed since the run was planned.
    """
    size = file.size
    if not file.is_small or start or stop < size:
        return None
    try:
        stream = os.open(file.path, os.O_RDONLY)  # os.open, since `open` takes longer than hashing a small file
        try:
            data = os.read(stream, size + 1)
            while len(data) < size and (more := os.read(stream, size + 1 - len(data))):
                data += more
            status = os.fstat(stream)
        finally:
            os.close(stream)
        touched = last_touched(file.path, status)
    except OSError as error:
        raise UserError(describe(error, file.path)) from error
    state = (len(data), status.st_size, status.st_mtime_ns, touched)
    if state != (size, size, file.changed, file.touched):
        raise _changed(file)
    return data, hashlib.sha256(data).hexdigest()


def hash_piece(file: InputFile, start: int, stop: int) -> str:
    """SHA-256 of bytes [start, stop) of a file, in hexadecimal.

    Raises:
        UserError: the file has changed since the run was planned.
    """
    digest, size_read, changed, touched = hashlib.sha256(), 0, 0, 0
    content: str | None = None
    try:
        for path in _paths(file):
            with open_raw(path) as stream:
                size = stream.seek(0, os.SEEK_END)
                place, end = max(start - size_read, 0), min(stop - size_read, size)
                stream.seek(place)
                # Of an object, bytes read a moment ago come from the local cache.
                while place < end and (data := stream.read(min(end - place, _AT_ONCE))):
                    digest.update(data)
                    place += len(data)
                if isinstance(stored := to_place(path, listed=True), StorePath):
                    listed = stored.stat()
                    size, content = listed.st_size, listed.content
                else:
                    status = os.fstat(stream.fileno())
                    changed, touched = max(changed, status.st_mtime_ns), max(touched, last_touched(path, status))
            size_read += size
    except OSError as error:
        raise UserError(describe(error, file.path)) from error
    size = file.size if file.parts else size_read  # the size of a data set is not that of its files
    state = changed if content is None else content
    if is_hashed(file) and (size, state, touched) != (file.size, file.state, file.touched):
        raise _changed(file)
    return digest.hexdigest()


def _changed(file: InputFile) -> UserError:
    return changed_while_read(file, "remove the output folder and run the same command again")


def source_hash(file: InputFile, piece_bytes: int | None) -> str:
    """The hash of a file in pieces of `piece_bytes` (None: as a whole), computed by this process."""
    size = _size(file)
    pieces = [(start, start + piece_bytes) for start in range(0, size, piece_bytes)] if piece_bytes else [(0, size)]
    return _joined(bytes.fromhex("".join(hash_piece(file, *piece) for piece in pieces)))


class SourceHashes:
    """The hashes of all files, combined from the reports of tasks in any order.

    Args:
        tasks: the segments of each task; segments of a file are consecutive, in the order of the files.
    """

    def __init__(self, files: list[InputFile], tasks: list[list[Segment]]):
        # Python arrays: only single numbers are read.
        self._counts = array("q", bytes(8 * len(files)))  # number of segments, and thus of pieces, of each file
        self._spans = array("q", bytes(8 * len(files)))  # number of the first segment of each file
        for segment in itertools.chain.from_iterable(tasks):
            number = segment.file.number
            self._spans[number] = self._spans[number] or segment.stop - segment.start
            self._counts[number] += 1
        self._first = array("q", itertools.accumulate(self._counts, initial=0))
        self._starts = array("q", itertools.accumulate(map(len, tasks), initial=0))
        self._digests = bytearray(_DIGEST_BYTES * self._starts[-1])

    def pieces(self, task: int, segments: list[Segment]) -> list[tuple[int, int]]:
        """For each segment of a task the bytes [start, stop) of its file that the task hashes."""
        pieces = []
        for place, segment in enumerate(segments, self._starts[task]):
            size = self._piece_bytes(segment.file)
            number = place - self._first[segment.file.number]
            pieces.append((number * size, (number + 1) * size))
        return pieces

    def add(self, task: int, digests: str) -> None:
        """Add the digests of a task's pieces."""
        start, stop = (_DIGEST_BYTES * self._starts[number] for number in (task, task + 1))
        self._digests[start:stop] = bytes.fromhex(digests)

    def of(self, file: InputFile) -> Fields:
        """The manifest's entry of a file: its hash, and the piece size if there are several pieces."""
        start, stop = (_DIGEST_BYTES * self._first[number] for number in (file.number, file.number + 1))
        if not is_hashed(file):
            return {"sha256": None}
        if start == stop:  # a table without rows, which no task reads
            return {"sha256": source_hash(file, None)}
        several = {"piece_bytes": self._piece_bytes(file)} if self._counts[file.number] > 1 else {}
        return {"sha256": _joined(bytes(self._digests[start:stop])), **several}

    def _piece_bytes(self, file: InputFile) -> int:
        """Piece size: for plain text what each task reads, for other formats equal shares."""
        count = self._counts[file.number]
        if count == 1 or file.compression or file.has_rows:
            return -(-_size(file) // count)
        return self._spans[file.number]


def _joined(digests: bytes) -> str:
    """The hash of a file: that of a single piece, else the SHA-256 of the digests of all pieces."""
    return (digests if len(digests) == _DIGEST_BYTES else hashlib.sha256(digests).digest()).hex()


def _paths(file: InputFile) -> tuple[str, ...]:
    return (file.parts or (file.path,)) if is_hashed(file) else ()


def _size(file: InputFile) -> int:
    """Bytes of the file; for a saved data set of its files, which differ from the size in its metadata."""
    return sum(os.stat(path).st_size for path in _paths(file)) if file.parts else file.size
