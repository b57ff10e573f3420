"""Files that are whole or absent: write aside, fsync, rename."""

import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.pipeline.errors import UserError

ASIDE = ".tmp-"  # an interrupted write leaves a file of this prefix, which nothing reads and a rerun removes


@contextmanager
def publishing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Give a path to write to; afterwards fsync it and rename it to `path`. Nothing half-written gets that name.

    durable: whether it must survive a power failure. A report that is cheap to make again need not, if its reader
    takes an unreadable one for none.
    Raises UserError on a full disk, a folder that may not be written, and other failures of the file system.
    """
    path = Path(path)
    aside = path.with_name(f"{ASIDE}{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        with readable_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield aside
            if durable:
                with open(aside, "rb+") as file:
                    os.fsync(file.fileno())
            os.replace(aside, path)
            if durable:
                sync_folder(path.parent)
    finally:
        if aside.exists():
            aside.unlink()


def publish_text(path: Path, text: str, durable: bool = True) -> None:
    """Write `text` as a whole file."""
    with publishing(path, durable) as aside:
        aside.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted writes left in `folder` and below."""
    for path in list(folder.rglob(f"{ASIDE}*")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which is made where it is missing; gives whether it is held: not if another process
    holds it. Raises UserError on a file system without locks, and on its other failures."""
    with readable_errors(path):
        file = open(path, "a")  # for writing: NFS locks nothing else
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        except OSError as error:
            raise UserError(
                f"{path}: can't be locked ({error.strerror or error}), expected a file system with flock; choose an "
                "--output on another one, or have this one mounted with it (Lustre: -o flock)"
            ) from error
        yield held


@contextmanager
def alone(output: Path, lock: Path) -> Iterator[None]:
    """Hold `lock` and remove leftovers in `output`: two processes would take each other's files for them.

    Raises UserError if another process holds it.
    """
    with holding(lock) as held:
        if not held:
            raise UserError(
                f"output: another process is at work in {output}; wait for it, or choose another --output"
            )
        with readable_errors(output):
            remove_leftovers(output)
        yield


@contextmanager
def readable_errors(path: Path | str) -> Iterator[None]:
    """Turn an OSError that a user can mend into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(describe(error, path)) from error


def describe(error: OSError, path: Path | str) -> str:
    """One line about a failure of the file system: what, where, what to do."""
    where = error.filename or path
    advice = {
        errno.ENOSPC: "the disk is full; free space or choose another --output, then run the same command again",
        errno.EDQUOT: "the disk quota is used up; free space, then run the same command again",
        errno.EROFS: "the file system is read-only; choose another --output",
        errno.EACCES: "permission denied; choose another folder or change its permissions",
        errno.EPERM: "not permitted; choose another folder or change its permissions",
        errno.ENOENT: "not found (any more); restore it, then run the same command again",
        errno.ENOTDIR: "a part of this path is a file; choose another path",
    }.get(error.errno or 0, f"{error.strerror or error}; mend this, then run the same command again")
    return f"{where}: {advice}"


def sha256_of(*paths: Path | str) -> str:
    """SHA-256 of a file, or of several as if they were one, hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
