"""Objects of a store as seekable file objects, read through a local cache."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cloze.pipeline.stores import shared
from cloze.pipeline.stores.cache import Cache, CachedFile
from cloze.pipeline.stores.places import StorePath, is_url, to_place
from cloze.pipeline.stores.temporary_folders import temporary_folder

_AHEAD = 4 << 20  # bytes per fetch
_SCRATCH_BYTES = 1 << 30  # size of a process's own cache: what it reads now and shortly before


@cache
def scratch_cache() -> Cache:
    """A temporary cache, removed with this process."""
    return Cache(temporary_folder(), _SCRATCH_BYTES, "TMPDIR")


class StoredFile(io.RawIOBase):
    """An object as a file to read.

    Args:
        open_copy: opens the object's copy in a cache, and opens it again if the cache has removed it.
    """

    def __init__(self, open_copy: Callable[[], CachedFile]):
        self._open, self._copy, self._place = open_copy, open_copy(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._copy.size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def size(self) -> int:
        return self._copy.size

    def readinto(self, buffer: Any) -> int:
        start = self._place
        stop = min(start + len(buffer), self._copy.size)
        if stop <= start:
            return 0
        if self._copy.removed:  # a removed copy that is still open would grow beyond the cache's limit
            self._copy.close()
            self._copy = self._open()
        first = start // _AHEAD * _AHEAD
        self._copy.need([(first, min(max(stop, first + _AHEAD), self._copy.size))])
        data = self._copy.read(start, stop)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._copy.close()
        super().close()


def open_stored(url: str | StorePath) -> StoredFile:
    """Open an object for reading.

    Raises:
        FileNotFoundError: there is none.
    """
    source = to_place(url, listed=True)
    assert isinstance(source, StorePath), url
    status = source.stat()
    identity = f"{source} {status.content}"
    return StoredFile(lambda: scratch_cache().open(source, status.st_size, identity, checked=True))


def fetched(folder: StorePath, names: tuple[str, ...]) -> Path:
    """A local folder with copies of the existing objects of these names in a store's folder."""
    local = temporary_folder(folder)
    for name in names:
        try:
            (local / name).write_bytes(shared.read(folder / name))
        except FileNotFoundError:
            continue
    return local


def open_raw(path: str) -> io.RawIOBase:
    """Open a local file, or a store's object by its URL, without a buffer.

    Raises:
        OSError: the place can't be read.
    """
    # Not through a Path, whose construction takes as long as opening the file.
    return open_stored(path) if is_url(path) else open(path, "rb", buffering=0)
