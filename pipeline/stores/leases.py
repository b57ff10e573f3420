"""Leases: at most one holder of an object, over any number of machines, by conditional writes.

The holder rewrites the object every few seconds. A process that wants the lease watches the object: if it has not
changed for the lease's duration, by the watcher's own clock, its holder is gone, and the lease is taken over with a
conditional write. Clocks of different machines are never compared. A holder that could not renew in time learns it from
`Lease.check`, before work that only one process may do, and from `Lease.silence`, which says why a long job must end.
"""

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cloze.pipeline.bounds import MOST_SECONDS
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.untrusted import is_number, load_json

SECONDS = 30.0  # duration in seconds: a lease not renewed for that time counts as abandoned
_RENEWALS, _RENEW_SECONDS = 6, 5.0  # renewals per duration, and their maximum interval in seconds
# share of the duration for which renewals may fail: the first failure may be one interval late
_PATIENCE = 1 - 1 / _RENEWALS
_LOOKS, _LOOK_SECONDS = 10, 5.0  # checks by a watcher per duration, and their maximum interval in seconds
_EARLIER = 20  # number of consecutive starts without a lease whose names are kept
_LEAVE_SECONDS = 3.0  # maximum seconds of a release, since an error may be reported only after it


class Lease:
    """A held lease; see `leased`."""

    def __init__(self, path: StorePath, version: Fields, token: str, seconds: float):
        self._path, self._version, self._token, self._seconds = path, version, token, seconds
        self._renewed = time.monotonic()
        self._failing_since: float | None = None  # start of the first renewal of the current series of failures
        self._problem: UserError | OSError | None = None
        self._lost: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if another process may hold the lease now."""
        if self._lost is None and time.monotonic() - self._renewed > self._seconds:
            self._lost = "it could not be renewed in time"
        if self._lost:
            raise UserError(
                f"{self._path}: the lease was lost ({self._lost}), expected to hold it to the end: another "
                "command may be at work there; run the same command again when that has ended"
            )

    @property
    def taken(self) -> str | None:
        """Why the lease is lost; None while it is held or the store does not answer: a late renewal that finds the
        object unchanged proves that no other process has held the lease.
        """
        return self._lost

    @property
    def silence(self) -> str | None:
        """Why the holder must end: renewals have failed for so long that another process may take over the lease. None
        otherwise; a process that was only paused and then renews has not failed.
        """
        since = self._failing_since
        if since is None or self._problem is None or time.monotonic() - since <= self._seconds * _PATIENCE:
            return None
        return str(self._problem)

    def release(self) -> None:
        """Remove the lease, unless another process may have taken it over. If the store does not answer, the next
        holder waits until it expires.
        """
        self._ended.set()
        leaving = threading.Thread(target=self._remove, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)

    def _remove(self) -> None:
        self._thread.join()
        if self._lost is None and time.monotonic() - self._renewed < self._seconds / 2:
            with suppress(UserError):
                self._path.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(min(self._seconds / _RENEWALS, _RENEW_SECONDS)):
            began = time.monotonic()
            self._failing_since = self._failing_since or began
            try:
                version = _write(self._path, self._token, self._seconds, self._version)
                if version is None:
                    self._lost = "another has taken it over, or removed it"
                    return
                self._version, self._renewed = version, began
                self._failing_since = self._problem = None
            except (UserError, OSError) as error:
                self._problem = error  # the store may answer again later


def _content(token: str, seconds: float) -> bytes:
    fields = {
        "token": token,
        "seconds": seconds,
        "renewed": uuid.uuid4().hex,
        "host": platform.node(),
        "pid": os.getpid(),
    }
    return json.dumps(fields).encode()


def _write(path: StorePath, token: str, seconds: float, before: Fields | None) -> Fields | None:
    """Write the lease if its version is `before` (None: if there is none).

    Returns:
        Its new version, or None if another process has changed it.
    """
    version = path.writer.write_if(path.key, _content(token, seconds), before)
    if version is None and _read(path).get("token") == token:  # a response was lost, and the retry found its own write
        info = path.info()
        version = None if info is None else info.version
    return version


def _read(path: StorePath) -> Fields:
    """The fields of a lease; none if there is no lease, or what none has written.

    Raises:
        UserError: the store can't be used.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        found = load_json(content)
    except ValueError:
        return {}
    seconds = found.get("seconds") if isinstance(found, dict) else None
    return found if is_number(seconds) and 0 < seconds <= MOST_SECONDS else {}


@contextmanager
def leased(
    path: StorePath, note: Callable[[str], None], patience_seconds: float = 0.0, own: Path | None = None
) -> Iterator[Lease | None]:
    """Hold the lease of an object within the context; yields None if another process holds it.

    An abandoned lease is taken over after its duration.

    Args:
        note: called with messages for the user.
        patience_seconds: how long renewals may fail before the holder ends; the duration is a fifth longer, and at
            least 30 s.
        own: a local file of this holder, under a lock, with the name of the last holder (and of later starts without a
            lease), so that the lease of a killed process on this machine is taken over at once.

    Raises:
        UserError: the store does not enforce the conditions of writes, or can't be used.
    """
    token, seconds = uuid.uuid4().hex, max(SECONDS, patience_seconds / _PATIENCE)
    dead = own.read_text().split() if own and own.is_file() else []
    if own:  # with the earlier names until the lease is taken, in case this start fails before
        own.write_text("\n".join([*dead[-_EARLIER:], token]))
    version = _take(path, token, seconds, note, dead)
    if version is not None:
        if own:
            own.write_text(token)
        version = _probe(path, token, seconds, version)
    if version is None:
        yield None
        return
    lease = Lease(path, version, token, seconds)
    try:
        yield lease
    finally:
        lease.release()


def _probe(path: StorePath, token: str, seconds: float, version: Fields) -> Fields | None:
    """Write an acquired lease again, then require that the store refuses two writes whose conditions do not hold: that
    there is no lease, and that it still has the version before.

    Returns:
        The lease's new version; None if another process has changed it.
    """
    renewed, content = _write(path, token, seconds, version), _content(token, seconds)
    if any(path.writer.write_if(path.key, content, wrong) is not None for wrong in (None, version)):
        path.unlink()
        raise UserError(
            f"{path}: found a store that does not enforce conditional writes, so that a second command could write "
            "there at the same time, expected one that does, such as S3, Google Cloud Storage, Azure, R2 or MinIO; "
            "write to a folder or to another store"
        )
    return renewed


def _take(path: StorePath, token: str, seconds: float, note: Callable[[str], None], dead: list[str]) -> Fields | None:
    """The version of the acquired lease; None if another process holds it.

    Args:
        dead: tokens of holders that have ended.
    """
    write = partial(_write, path, token, seconds)
    if (version := write(None)) is not None:
        return version
    seen, held = path.info(), _read(path)
    if seen is not None and held.get("token") in dead and (version := write(seen.version)) is not None:
        return version
    wait = float(held.get("seconds", seconds))
    note(f"{path}: held by process {held.get('pid')} on {held.get('host')}; watching for {wait:.0f} s whether it lives")
    began, changed = time.monotonic(), False
    while seen is not None and time.monotonic() - began < wait:
        time.sleep(min(wait / _LOOKS, _LOOK_SECONDS))
        now = path.info()
        if now is not None and now.version != seen.version:
            if changed:
                return None
            changed, began = True, time.monotonic()  # the last request of a killed process may arrive late
        seen = now
    return write(None if seen is None else seen.version)
