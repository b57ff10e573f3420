"""Temporary folders for uploads and downloads; removed with the process, also after a kill."""

import fcntl
import os
import shutil
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from cloze.pipeline.errors import UserError

SCRATCH = "cloze-scratch-"  # prefix of a process's folder in TMPDIR
_LOCK = "lock"
_NEW_SECONDS = 60  # seconds; a newer folder may not have its lock yet
_alone = threading.Lock()
_places: dict[str, str] = {}  # local copies -> what they are copies of


def temporary_folder(copy_of: object = None) -> Path:
    """A new empty folder in the system's temporary folder (TMPDIR).

    Args:
        copy_of: what it will be a copy of, by whose name a message calls it (`in_users_terms`).

    Raises:
        UserError: nothing can be written to any that is usual.
    """
    with _alone:
        folder = Path(tempfile.mkdtemp(dir=_own().name))
    if copy_of is not None:
        show_as(folder, copy_of)
    return folder


def show_as(folder: Path, place: object) -> None:
    """Let messages name the place that a folder is a copy of."""
    _places[str(folder)] = str(place)


def in_users_terms(line: str) -> str:
    """A message with the places of which there were local copies, instead of these."""
    for folder in sorted(_places, key=len, reverse=True):
        line = line.replace(folder, _places[folder])
    return line


@cache
def _own() -> tempfile.TemporaryDirectory[str]:
    """This process's folder, removed at its end; folders of killed processes are removed first."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            f"TMPDIR: found no folder for temporary files that can be written ({error.strerror}); free space there, or "
            "name another one in the environment variable TMPDIR"
        ) from error
    for folder in Path(place).glob(f"{SCRATCH}*"):
        _remove_abandoned(folder)
    folder_of_process = tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True)
    _locked(Path(folder_of_process.name))  # never closed, so that the lock is held until the process ends
    return folder_of_process


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None if another process holds it or the folder can't be opened."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # another user's folder, or just removed
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(folder: Path) -> None:
    """Remove another process's folder if that process has ended."""
    try:
        status = folder.stat()
    except OSError:
        return
    if status.st_uid != os.getuid() or status.st_mtime > time.time() - _NEW_SECONDS:
        return
    if (descriptor := _locked(folder)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
