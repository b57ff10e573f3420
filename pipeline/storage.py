"""Atomic writes of files (temporary name, fsync, rename), file locks, and errors of the file system in one line."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import IO, Any

from cloze.pipeline.errors import STANDARD_STREAMS, UserError
from cloze.pipeline.stores.leases import leased
from cloze.pipeline.stores.places import Place, StorePath
from cloze.pipeline.stores.temporary_folders import SCRATCH, temporary_folder
from cloze.pipeline.untrusted import check_regular, naming

ASIDE = ".tmp-"  # prefix of temporary files; those of interrupted writes are never read, and removed by a rerun
OF_FILE_SYSTEM = "lost+found"  # what the root folder of a new ext4 has
_MOMENTS = (0.005, 0.02, 0.08)  # seconds: whoever looks whether a lock is free holds it for microseconds
_STORED_PIECE = 8 << 20  # bytes per request to a store


def aside_of(path: Path) -> Path:
    """A temporary name beside a path, for what gets the path's name when it is whole."""
    return path.with_name(f"{ASIDE}{uuid.uuid4().hex[:12]}-{path.name}")


@contextmanager
def publishing(path: Place, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; then fsync it and rename it to `path`, or upload it to the store. An
    incomplete file never has the name `path`.

    Not needed for a cheap report whose reader treats an unreadable one as missing.

    Args:
        durable: whether it must survive a power failure.

    Raises:
        UserError: on a full disk, a folder that may not be written, a path that is no regular file, and other failures
            of the file system.
    """
    if isinstance(path, StorePath):
        with _sending(path) as aside:
            yield aside
        return
    path = Path(path)
    check_replaceable(path)
    aside = aside_of(path)
    try:
        with readable_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield aside
            if durable:
                sync_file(aside)
            os.replace(aside, path)
            if durable:
                sync_folder(path.parent)
    finally:
        with suppress(OSError):  # a name that is too long is the error of the write, not of this
            aside.unlink(missing_ok=True)


def is_same_file(first: str, second: str) -> bool:
    """Whether two paths name one file, however they are spelled, also through links."""
    try:
        return os.path.samefile(first, second)
    except OSError:  # one of them is missing, or lies in a store
        return first == second


def check_replaceable(path: Path) -> None:
    """Raise UserError where a file would be put in the place of a folder, or of a device, a pipe or a link: /dev/null
    and /dev/stdout would be none any more, and what a link names would stay as it was.
    """
    with readable_errors(path):
        if path.is_symlink():
            raise UserError(f"{path}: found a link to {path.readlink()}, expected a file or none; name the file itself")
        if path.is_dir():
            raise UserError(f"{path}: found a folder, expected a file or none; move it away, or choose another path")
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: found no regular file, expected one or none; choose another path")


@contextmanager
def _sending(path: StorePath) -> Iterator[Path]:
    folder = temporary_folder()
    try:
        with readable_errors(folder):
            yield folder / path.name
            path.write(folder / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_text(path: Place, text: str, durable: bool = True) -> None:
    """Write `text` to a file atomically."""
    with publishing(path, durable) as aside:
        aside.write_text(text, encoding="utf-8")


def publish_json(path: Place, value: object, *, ensure_ascii: bool = True) -> None:
    """Write a value as indented JSON to a file atomically."""
    publish_text(path, json.dumps(value, indent=1, ensure_ascii=ensure_ascii) + "\n")


def sync_file(path: Path) -> None:
    """Wait until the file is on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Place) -> None:
    """Remove temporary files of interrupted writes in `folder` and below."""
    if isinstance(folder, StorePath):
        keys = [each.key for each in folder.objects()]
        start = len(folder.key)
        left = [key for key in keys if any(part.startswith(ASIDE) for part in key[start:].split("/"))]
        with suppress(UserError):  # who writes there may have no right to delete; nobody reads them
            folder.writer.delete(left)
        return
    for path in list(folder.rglob(f"{ASIDE}*")):
        clear(path)


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which is created if missing; yields whether it is held (false if another process holds
    it).

    Raises:
        UserError: on a file system without locks, and for other errors.
    """
    with readable_errors(path):
        check_regular(path)
        file = open(path, "a")  # opened for writing, as NFS requires for locks
    try:
        # not held either: a file that its last holder has removed since it was opened
        held = take_lock(file, path) and os.fstat(file.fileno()).st_nlink > 0
        yield held
    finally:
        with suppress(OSError):  # as on a full disk; nothing was written, so nothing is lost
            file.close()


def take_lock(file: IO[Any], path: Path) -> bool:
    """Take the lock of an open file, which lasts until each process that has inherited the file has closed it; False:
    another process holds it, for longer than one that only looks whether it is free.

    Raises:
        UserError: on a file system without locks.
    """
    for wait in (*_MOMENTS, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if wait is not None:
                time.sleep(wait)
        except OSError as error:
            raise UserError(
                f"{path}: can't be locked ({error.strerror or error}), expected a file system with flock; choose a "
                "folder on another one, or have this one mounted with it (Lustre: -o flock)"
            ) from error
    return False


def inside(folder: Path, name: str) -> Path:
    """The file of a name that somebody else has given, such as the key of an object, in a folder.

    Raises:
        UserError: it would lie outside of the folder, where what is fetched must not be written.
    """
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise UserError(f"{folder}: found the name {name!r:.200} of a file to fetch, expected one below the folder")
    return folder / name


def write_at(descriptor: int, data: bytes, place: int) -> None:
    """Write all of `data` from a byte of an open file on, where `os.pwrite` may write a part of it."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, place)
        view, place = view[count:], place + count


def clear(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with its content, or the file, link or pipe in its place, if there is any: `shutil.rmtree` opens
    what it is given before it looks whether that is a folder, and waits at a pipe.

    Raises:
        OSError: something can't be removed, unless errors are ignored.
    """
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path, ignore_errors=ignore_errors)
        except OSError as error:
            error.filename = str(path)  # not what is in it, which rmtree names by the last part alone
            raise
        return
    with suppress(OSError) if ignore_errors else nullcontext():
        path.unlink(missing_ok=True)


def remove_tree(folder: Place) -> bool:
    """Remove a folder with its content as far as possible.

    Returns:
        Whether nothing is left.
    """
    if isinstance(folder, StorePath):
        with suppress(UserError):  # who writes there may have no right to delete
            folder.writer.delete([each.key for each in folder.objects()])
    else:
        clear(folder, ignore_errors=True)
    return not folder.is_dir()


@contextmanager
def alone(output: Place, lock: Place, note: Callable[[str], None] = lambda _: None) -> Iterator[Callable[[], None]]:
    """Hold `lock` and remove leftovers in `output`, which is safe only for a single process.

    Yields a function that raises UserError if the lock was lost, which can happen in a store (leases.py).

    Args:
        note: called with messages for the user.

    Raises:
        UserError: another process holds the lock.
    """
    with holding(lock) if isinstance(lock, Path) else leased(lock, note) as held:
        if not held:
            raise UserError(f"output: another process is at work in {output}; wait for it, or choose another --output")
        with readable_errors(output):
            remove_leftovers(output)
        yield (lambda: None) if isinstance(held, bool) else held.check


@contextmanager
def readable_errors(path: Place | str) -> Iterator[None]:
    """Turn an OSError that a user can fix into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(describe(error, path)) from error


@contextmanager
def at_rest(file: IO[Any], path: Path | str) -> Iterator[None]:
    """A context in which an open file is read to its end: UserError if it was written meanwhile, by its size and time.

    Whoever puts another file in its place does no harm: the open one stays as it was. What is no regular file changes
    as it is read.
    """

    def changes() -> tuple[int, int] | None:
        with suppress(UnsupportedOperation):  # one in memory
            status = os.fstat(file.fileno())
            return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
        return None

    before = changes()
    yield
    if changes() != before:
        raise UserError(f"{path}: changed while it was read, expected a file at rest; run the same command again")


def describe(error: OSError, path: Place | str) -> str:
    """One line about an error of the file system: what, where, what to do."""
    where = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) and error.filename2:  # of a copy: where it goes
        where = error.filename2
    other = "TMPDIR" if f"/{SCRATCH}" in str(where) else "--output"
    if where in STANDARD_STREAMS.values():
        other = "file for it"
    advice = {
        errno.ENOSPC: f"the disk is full; free space or choose another {other}, then run the same command again",
        errno.EDQUOT: "the disk quota is used up; free space, then run the same command again",
        errno.EROFS: f"the file system is read-only; choose another {other}",
        errno.EACCES: "permission denied; choose another folder or change its permissions",
        errno.EPERM: "not permitted; choose another folder or change its permissions",
        errno.ENOENT: "not found (any more); restore it, then run the same command again",
        errno.EEXIST: "found a file, expected a folder or nothing; choose another path",
        errno.EISDIR: "found a folder, expected a file; move it away, then run the same command again",
        errno.ENOTDIR: "a part of this path is a file; choose another path",
    }.get(error.errno or 0, f"{error.strerror or error}; fix this, then run the same command again")
    return f"{where}: {advice}"


def sha256_of(*paths: Place | str) -> str:
    """SHA-256 (hexadecimal) of a file, or of several concatenated files, read in pieces.

    Raises:
        UserError: one is no regular file.
    """
    digest = hashlib.sha256()
    for path in paths:
        if isinstance(path, StorePath):
            size = path.stat().st_size
            for start in range(0, size, _STORED_PIECE):
                digest.update(path.read_range(start, min(start + _STORED_PIECE, size)))
            continue
        check_regular(Path(path))
        with naming(path), open(path, "rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
