"""Retries of requests while an object store does not answer, until the time that the user has set is over."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from cloze.launch.run.commits import TakenOver
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.clients import ADVICE

_REST_SECONDS = 5.0  # seconds between two tries; the client itself retries for a minute
_Answer = TypeVar("_Answer")


class StoreAway(UserError):
    """The store has not answered for too long."""


class ScratchLost(UserError):
    """A file that is to be sent can't be read on this machine, which no wait for the store changes."""


@contextmanager
def reading(path: Path, folder: Path) -> Iterator[None]:
    """Turn an OSError into a ScratchLost. It names the folder's parent, since messages show the folder of a run on
    scratch as its place in the store, where nothing is wrong.

    Args:
        path: file in the folder.
    """
    try:
        yield
    except OSError as error:
        raise ScratchLost(
            f"checkpoint.scratch: can't read the run's {path.relative_to(folder)} in {folder.parent} "
            f"({error.strerror or error}), expected it as the run has written it; leave the folder alone while a run "
            "uses it, and run the same command again"
        ) from error


class Patience:
    """Repeats a request to a store until it succeeds or the store has not answered for too long.

    Args:
        warn: called with a line when the store stops answering, and when it answers again.
        ended: set when the answer is no longer needed.
    """

    def __init__(self, seconds: float, warn: Callable[[str], None], ended: threading.Event) -> None:
        self._seconds, self._warn, self._ended = seconds, warn, ended
        self.failures = 0
        """Number of times that the store has stopped answering a request."""

    def __call__(self, ask: Callable[[], _Answer]) -> _Answer:
        """The result of `ask`.

        Raises:
            StoreAway: the time since the first failure is over.
            TakenOver, ScratchLost: immediately.
        """
        failed: float | None = None  # time of the first failure: a slow upload does not count as one
        while True:
            try:
                answer = ask()
            except (TakenOver, ScratchLost):
                raise
            except UserError as error:
                now = time.monotonic()
                left = self._seconds - (now - (failed or now))
                if left <= 0 or self._ended.is_set():
                    raise StoreAway(
                        f"{error}; expected an answer within checkpoint.store_patience_seconds = "
                        f"{self._seconds:g} of the first failure"
                    ) from error
                if failed is None:
                    self._warn(
                        f"{str(error).removesuffix(ADVICE)}; training continues, and the upload is retried for "
                        f"{left:.0f} s"
                    )
                    failed, self.failures = now, self.failures + 1
                self._ended.wait(min(_REST_SECONDS, left))
            else:
                if failed is not None:
                    self._warn("the store answers again")
                return answer
