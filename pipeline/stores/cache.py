"""Local cache of the parts of a store's objects that were read: sparse files with a bounded total size.

A copy has the object's bytes at their offsets, followed by one byte per page of 4 KiB that marks whether the page is
present. Several processes use a folder of copies concurrently without communication: two processes write the same bytes
at the same place, a page is marked after it was written, and a removed copy still exists for processes that have it
open. A marked page that was lost in a power failure is detected by its reader (`CachedFile.forget`).
"""

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import write_at
from cloze.pipeline.stores.places import StorePath

PAGE = 1 << 12
_REQUEST_PAGES = 2048  # 8 MiB: maximum bytes of a request
_REQUESTS = 16  # concurrent requests
_NAME_DIGITS = 40  # hexadecimal characters of a copy's name
# Copies are removed when they exceed 7/8 of the limit, until they have 3/4. A process checks after it has written 1/128
# of the limit, so 16 processes can't exceed the limit together.
_FULL, _KEPT, _BETWEEN = 7 / 8, 3 / 4, 1 / 128


class Cache:
    """A folder of copies.

    Args:
        limit_bytes: approximate maximum on disk.
        name: the option named in errors.

    Raises:
        UserError: the folder can't be made or written.
    """

    def __init__(self, folder: Path, limit_bytes: int, name: str):
        self.folder, self.limit_bytes, self.name = folder, limit_bytes, name
        self._written, self._lock = limit_bytes, threading.Lock()  # so that the first write checks the size
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "permission denied", str(folder))
        except OSError as error:
            raise self.trouble(error) from error

    @cached_property
    def requests(self) -> ThreadPoolExecutor:
        """The threads that fetch; they release the interpreter's lock while they wait."""
        return ThreadPoolExecutor(_REQUESTS, thread_name_prefix="cloze-fetch")

    def open(self, source: StorePath, size: int, identity: str, *, checked: bool = False) -> "CachedFile":
        """The copy of an object of `size` bytes.

        Args:
            identity: identifies its content.
            checked: for what has no checksum of ours, as `ObjectClient.read`.
        """
        name = hashlib.sha256(f"{identity}\n{size}".encode()).hexdigest()[:_NAME_DIGITS]
        try:
            return CachedFile(self, source, self.folder / name, size, checked)
        except OSError as error:
            raise self.trouble(error) from error

    def whole(self, source: StorePath, digest: str) -> bytes:
        """All bytes of the object with this SHA-256. One process per machine fetches it, the others wait.

        Raises:
            UserError: the object is missing in the store, or has changed.
        """
        if (content := self._kept(digest)) is not None:
            return content
        with self._alone(".fetching"):
            if (content := self._kept(digest)) is not None:
                return content
            try:
                content = source.read_bytes()
            except FileNotFoundError:
                content = b""
            if hashlib.sha256(content).hexdigest() != digest:
                raise UserError(
                    f"{source}: found other content than a process of this run has found before, expected "
                    "an object at rest; run the same command again"
                )
            self._keep(content, digest)
        return content

    def keep(self, content: bytes, digest: str) -> None:
        """Save an object's content by its SHA-256 for other processes of this machine."""
        with self._alone(".fetching"):
            if self._kept(digest) is None:
                self._keep(content, digest)

    def _keep(self, content: bytes, digest: str) -> None:
        try:
            aside = self.folder / ".fetched"  # one process at a time writes there
            aside.write_bytes(content)
            os.replace(aside, self.folder / digest[:_NAME_DIGITS])
            self.wrote(len(content))
        except OSError as error:
            raise self.trouble(error) from error

    def _kept(self, digest: str) -> bytes | None:
        """The cached content with this SHA-256; None if it is missing or damaged."""
        path = self.folder / digest[:_NAME_DIGITS]
        try:
            content = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.trouble(error) from error
        return content if hashlib.sha256(content).hexdigest() == digest else None

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Hold a lock of the folder.

        Raises:
            UserError: it can't be held.
        """
        try:
            lock = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.trouble(error) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # a file system without locks
                raise self.trouble(error) from error
            yield
        finally:
            _close(lock)

    def trouble(self, error: OSError) -> UserError:
        """The UserError for an error of the disk."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return UserError(
                f"{self.name}: no space is left in {self.folder}; free some, give a smaller limit than "
                f"{self.limit_bytes / 1e9:,.1f} GB, or choose another folder"
            )
        return UserError(f"{self.name}: {self.folder} can't be used ({error.strerror or error}); choose another folder")

    def wrote(self, count: int) -> None:
        """Count written bytes, and remove the least recently used copies if the limit is exceeded."""
        with self._lock:
            self._written += count
            if self._written < self.limit_bytes * _BETWEEN:
                return
            self._written = 0
        self._trim()

    def _trim(self) -> None:
        with self._alone(".lock"):
            copies = []
            for entry in os.scandir(self.folder):
                if len(entry.name) == _NAME_DIGITS:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    copies.append((status.st_mtime_ns, status.st_blocks * 512, entry.path))
            total = sum(size for _, size, _ in copies)
            if total <= self.limit_bytes * _FULL:
                return
            for _, size, path in sorted(copies):
                os.unlink(path)
                total -= size
                if total <= self.limit_bytes * _KEPT:
                    return


def _close(descriptor: int) -> None:
    """Close a file of the cache, whose content is checked when it is read. An error, as on a full disk, would hide the
    one before.
    """
    with suppress(OSError):
        os.close(descriptor)


class CachedFile:
    """The copy of one object, open. Bytes are read from `fileno()` once `need` has fetched them."""

    def __init__(self, cache: Cache, source: StorePath, path: Path, size: int, checked: bool):
        self.size, self.source, self._checked = size, source, checked
        self._cache, self._pages = cache, -(-size // PAGE)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._descriptor).st_size != size + self._pages:
            os.ftruncate(self._descriptor, size + self._pages)  # several processes may do so, with the same length
        os.utime(self._descriptor)  # the modification time orders copies by their last use

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if (descriptor := self.__dict__.pop("_descriptor", None)) is not None:
            _close(descriptor)

    def fileno(self) -> int:
        return self._descriptor

    @property
    def removed(self) -> bool:
        """Whether it was removed from the folder; its space is freed when all processes have closed it."""
        return os.fstat(self._descriptor).st_nlink == 0

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fetched if necessary."""
        self.need([(start, stop)])
        return os.pread(self._descriptor, stop - start, start)

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the missing pages of byte ranges [start, stop).

        Raises:
            UserError: they can't be read from the store or written to the disk.
        """
        for low, high in self._missing(ranges):
            self._fetch(low, high)

    def _missing(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Ranges [low, high) of missing pages."""
        missing = []
        for start, stop in ranges:
            low, high = start // PAGE, min(-(-stop // PAGE), self._pages)
            marks = np.frombuffer(os.pread(self._descriptor, high - low, self.size + low), np.uint8)
            edges = np.flatnonzero(np.diff(marks == 0, prepend=False, append=False)) + low
            for first, last in edges.reshape(-1, 2).tolist():
                missing += [(each, min(each + _REQUEST_PAGES, last)) for each in range(first, last, _REQUEST_PAGES)]
        return missing

    def _fetch(self, low: int, high: int) -> None:
        start, stop = low * PAGE, min(high * PAGE, self.size)
        try:
            data = self.source.read_range(start, stop, checked=self._checked)
        except FileNotFoundError as error:
            raise UserError(
                f"{self.source}: not found (any more); restore it, then run the same command again"
            ) from error
        if len(data) != stop - start:
            raise UserError(
                f"{self.source}: found fewer than {self.size} bytes, expected so many: it has changed; "
                "restore it, then run the same command again"
            )
        try:
            write_at(self._descriptor, data, start)
            write_at(self._descriptor, b"\1" * (high - low), self.size + low)
            self._cache.wrote(len(data))
        except OSError as error:
            raise self._cache.trouble(error) from error

    def forget(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Mark byte ranges as missing, since they are damaged."""
        for start, stop in ranges:
            low, high = start // PAGE, min(-(-stop // PAGE), self._pages)
            write_at(self._descriptor, bytes(high - low), self.size + low)
