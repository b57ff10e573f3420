"""Which input was read: the hashes of files, made by the tasks that read them, piece by piece.

A file that one task reads is hashed as a whole. One that several read is hashed in as many pieces of equal size (the
last may be smaller), and its hash is that of theirs: so nothing is read twice, and no task's work grows with a file.
"""

import hashlib
import itertools
import os
from array import array

from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.files import TABLES, InputFile, Segment
from cloze.pipeline.storage import describe
from cloze.pipeline.stores.places import StorePath, is_url, to_place
from cloze.pipeline.stores.reading import open_raw

_AT_ONCE = 1 << 20  # bytes
_DIGEST_BYTES = 32


def is_hashed(file: InputFile) -> bool:
    """Data sets on the hub have no files here; their commit says what was read."""
    return file.format != "dataset" or bool(file.parts)


def read_small(file: InputFile, start: int, stop: int) -> tuple[bytes, str] | None:
    """The bytes of a small file, and their SHA-256 in hexadecimal: opened once, and read at once.

    None if it isn't small, or [start, stop) isn't all of it: read it, and then `hash_piece`.
    Raises UserError if the file isn't any more what the run was planned with.
    """
    size = file.size
    if not file.is_small or start or stop < size:
        return None
    try:
        stream = os.open(file.path, os.O_RDONLY)  # not `open`, which costs more than hashing a small file
        try:
            data = os.read(stream, size + 1)
            while len(data) < size and (more := os.read(stream, size + 1 - len(data))):
                data += more
            status = os.fstat(stream)
        finally:
            os.close(stream)
    except OSError as error:
        raise UserError(describe(error, file.path)) from error
    if (len(data), status.st_size, status.st_mtime_ns) != (size, size, file.changed):
        raise _changed(file)
    return data, hashlib.sha256(data).hexdigest()


def hash_piece(file: InputFile, start: int, stop: int) -> str:
    """SHA-256 of bytes [start, stop) of a file, in hexadecimal.

    Raises UserError if the file isn't any more what the run was planned with.
    """
    digest, found, state = hashlib.sha256(), 0, 0
    try:
        if is_url(file.path):
            digest, found, state = _stored_piece(file.path, start, stop)
        for path in _paths(file):
            stream = os.open(path, os.O_RDONLY)
            try:
                size = os.fstat(stream).st_size
                place, end = max(start - found, 0), min(stop - found, size)
                while place < end and (data := os.pread(stream, min(end - place, _AT_ONCE), place)):
                    digest.update(data)
                    place += len(data)
                state = max(state, os.fstat(stream).st_mtime_ns)
            finally:
                os.close(stream)
            found += size
    except OSError as error:
        raise UserError(describe(error, file.path)) from error
    size = file.size if file.parts else found  # that of a data set is not the size of its files
    if is_hashed(file) and (size, state) != (file.size, file.state):
        raise _changed(file)
    return digest.hexdigest()


def _changed(file: InputFile) -> UserError:
    return UserError(
        f"{file.path}: changed while it was read, expected a file at rest; remove the output folder and run the "
        "same command again"
    )


def _stored_piece(url: str, start: int, stop: int) -> tuple:
    """The digest of bytes [start, stop) of an object, its size, and what its content is known by, both as they are
    when all was read. What was read a moment ago comes from the local copy."""
    digest = hashlib.sha256()
    with open_raw(url) as stream:
        stream.seek(start)
        while stream.tell() < stop and (data := stream.read(min(stop - stream.tell(), _AT_ONCE))):
            digest.update(data)
    place = to_place(url)
    assert isinstance(place, StorePath), url
    status = place.stat()
    return digest, status.st_size, status.content


def source_hash(file: InputFile, piece_bytes: int | None) -> str:
    """The hash of a file in pieces of so many bytes (None: as a whole), all by this process."""
    size = _size(file)
    pieces = [(start, start + piece_bytes) for start in range(0, size, piece_bytes)] if piece_bytes else [(0, size)]
    return _joined(bytes.fromhex("".join(hash_piece(file, *piece) for piece in pieces)))


class SourceHashes:
    """The hashes of all files, put together from what tasks report in any order.

    tasks: the segments of each task; those of a file are neighbours, in the order of the files.
    """

    def __init__(self, files: list[InputFile], tasks: list[list[Segment]]):
        # Arrays of Python's, since it is single numbers that are asked for.
        self._counts = array("q", bytes(8 * len(files)))  # of segments, and so of pieces
        self._spans = array("q", bytes(8 * len(files)))  # of the first segment
        for segment in itertools.chain.from_iterable(tasks):
            number = segment.file.number
            self._spans[number] = self._spans[number] or segment.stop - segment.start
            self._counts[number] += 1
        self._first = array("q", itertools.accumulate(self._counts, initial=0))
        self._starts = array("q", itertools.accumulate(map(len, tasks), initial=0))
        self._digests = bytearray(_DIGEST_BYTES * self._starts[-1])

    def pieces(self, task: int, segments: list[Segment]) -> list[tuple[int, int]]:
        """The bytes [start, stop) of the file of each of a task's segments that it hashes."""
        found = []
        for place, segment in enumerate(segments, self._starts[task]):
            size = self._piece_bytes(segment.file)
            number = place - self._first[segment.file.number]
            found.append((number * size, (number + 1) * size))
        return found

    def add(self, task: int, digests: str) -> None:
        """What a task has found of its pieces."""
        start, stop = (_DIGEST_BYTES * self._starts[number] for number in (task, task + 1))
        self._digests[start:stop] = bytes.fromhex(digests)

    def of(self, file: InputFile) -> dict:
        """What the manifest says: the hash, and where it is one of several pieces the size of these."""
        start, stop = (_DIGEST_BYTES * self._first[number] for number in (file.number, file.number + 1))
        if not is_hashed(file):
            return {"sha256": None}
        if start == stop:  # a table without rows: no task read it
            return {"sha256": source_hash(file, None)}
        several = {"piece_bytes": self._piece_bytes(file)} if self._counts[file.number] > 1 else {}
        return {"sha256": _joined(bytes(self._digests[start:stop])), **several}

    def _piece_bytes(self, file: InputFile) -> int:
        """Those of plain text are what each task reads; of others they are equal shares."""
        count = self._counts[file.number]
        if count == 1 or file.compression or file.format in TABLES:
            return -(-_size(file) // count)
        return self._spans[file.number]


def _joined(digests: bytes) -> str:
    """The hash of a file from those of its pieces: of a single one that itself, else the SHA-256 of all of them."""
    return (digests if len(digests) == _DIGEST_BYTES else hashlib.sha256(digests).digest()).hex()


def _paths(file: InputFile) -> tuple[str, ...]:
    return (file.parts or (file.path,)) if is_hashed(file) and not is_url(file.path) else ()


def _size(file: InputFile) -> int:
    """Bytes of the file, or of the files of a saved data set, which aren't what it says of itself."""
    return sum(os.stat(path).st_size for path in _paths(file)) if file.parts else file.size
