"""Leases: at most one holder of an object, over any number of machines, by conditional writes.

The holder writes the object anew every few seconds. Another process that wants it watches: if it hasn't changed for as
long as the holder has promised to renew it, by the watcher's own clock, its holder is gone, and it is taken over, on
the condition that it still is as it was seen. No two clocks are compared. A holder that couldn't renew in time says so
when it is asked: `Lease.check`, before it does what only one may do, and `Lease.silence` of one that works for long and
must end.
"""

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import StorePath

SECONDS = 30.0  # after which a lease that wasn't renewed is taken for abandoned
_RENEWALS, _RENEW_SECONDS = 6, 5.0  # in that time, at most so long apart
_PATIENCE = 1 - 1 / _RENEWALS  # share of it that renewals may fail for: the first one that does may be one late
_LOOKS, _LOOK_SECONDS = 10, 5.0  # in that time, at most so long apart
_EARLIER = 20  # starts in a row that took no lease, of which the names are kept: enough for any that are repeated
_LEAVE_SECONDS = 3.0  # that a release takes at most: an error may wait behind it to be said


class Lease:
    """A lease that is held; see `leased`."""

    def __init__(self, path: StorePath, version: dict, token: str, seconds: float):
        self._path, self._version, self._token, self._seconds = path, version, token, seconds
        self._renewed = time.monotonic()
        self._failing_since: float | None = None  # when the first attempt began that has not been answered well
        self._problem: UserError | OSError | None = None
        self._lost: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if another may hold it by now."""
        if self._lost is None and time.monotonic() - self._renewed > self._seconds:
            self._lost = "it could not be renewed in time"
        if self._lost:
            raise UserError(f"{self._path}: the lease was lost ({self._lost}), expected to hold it to the end: another "
                            "command may be at work there; run the same command again when that has ended")

    @property
    def taken(self) -> str | None:
        """Why it is lost for good; None as long as it is held, or the store does not answer: a renewal that comes late
        and finds the object unchanged shows that no other process has held it since."""
        return self._lost

    @property
    def silence(self) -> str | None:
        """Why the holder must end: attempts to renew it have failed for so long that another may take it over from now
        on. None: not for so long. A process that was held up, and asks again when it goes on, has not failed to."""
        since = self._failing_since
        if since is None or self._problem is None or time.monotonic() - since <= self._seconds * _PATIENCE:
            return None
        return str(self._problem)

    def release(self) -> None:
        """Remove it, unless another may have taken it over; where the store is silent, the next one waits until its
        time is over."""
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
                content = _content(self._token, self._seconds)
                version = self._path.writer.write_if(self._path.key, content, self._version)
                if version is None and _token_of(self._path) != self._token:
                    self._lost = "another has taken it over, or removed it"
                    return
                # Otherwise an answer was lost, and the repetition met its own write.
                if version is None and (found := self._path.info()) is not None:
                    version = found.version
                if version is not None:
                    self._version, self._renewed = version, began
                    self._failing_since = self._problem = None
            except (UserError, OSError) as error:
                self._problem = error  # the store may come back


def _content(token: str, seconds: float) -> bytes:
    fields = {"token": token, "seconds": seconds, "renewed": uuid.uuid4().hex, "host": platform.node(),
              "pid": os.getpid()}
    return json.dumps(fields).encode()


def _token_of(path: StorePath) -> str | None:
    return _read(path).get("token")


def _read(path: StorePath) -> dict:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


@contextmanager
def leased(path: StorePath, note: Callable[[str], None], patience_seconds: float = 0.0, own: Path | None = None
           ) -> Iterator["Lease | Unchecked | None"]:
    """Hold the lease of an object while the context lasts; None if another holds it.

    An abandoned one is taken over after the time within which its holder has promised to renew it. Where the
    store has no conditional writes, the lease excludes no other process, and a message says so.

    Args:
        note: called with messages for the user.
        patience_seconds: how long renewals may fail before the holder ends; the promise is a fifth longer, and 30 s at
            least.
        own: a file of this machine that is this holder's alone, under a lock: it keeps the name of the last one, so
            that a lease which that one has left, killed, is taken over at once; and of starts since that took none.
    """
    token, seconds = uuid.uuid4().hex, max(SECONDS, patience_seconds / _PATIENCE)
    dead = own.read_text().split() if own and own.is_file() else []
    if own:  # with those before, until the lease is taken: a start that fails before leaves it to the next one
        own.write_text("\n".join([*dead[-_EARLIER:], token]))
    try:
        version = _take(path, token, seconds, note, dead)
        if own and version is not None:
            own.write_text(token)
        if version is not None and path.writer.write_if(path.key, _content(token, seconds), None) is not None:
            raise NotImplementedError  # an object that is there was made as if it weren't
    except NotImplementedError:
        note(f"{path}: the store has no conditional writes, so nothing keeps a second command from working there at "
             "the same time; see to it that there is but one")
        yield Unchecked()
        return
    if version is None:
        yield None
        return
    lease = Lease(path, version, token, seconds)
    try:
        yield lease
    finally:
        lease.release()


class Unchecked:
    """In the place of a lease where there can be none."""

    taken = silence = None

    def check(self) -> None:
        """Nothing can be known."""


def _take(path: StorePath, token: str, seconds: float, note: Callable[[str], None], dead: list[str]
          ) -> dict | None:
    """The version of the lease that was taken; None if another holds it. dead: tokens of holders that have ended."""

    def won(before: dict | None) -> dict | None:
        version = path.writer.write_if(path.key, _content(token, seconds), before)
        if version is None and _token_of(path) == token:  # an answer was lost, and the repetition met its own write
            found = path.info()
            version = None if found is None else found.version
        return version

    if (version := won(None)) is not None:
        return version
    seen, held = path.info(), _read(path)
    if seen is not None and held.get("token") in dead and (version := won(seen.version)) is not None:
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
            changed, began = True, time.monotonic()  # the last request of one that was killed may come late
        seen = now
    return won(None if seen is None else seen.version)
