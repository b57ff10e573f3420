"""What asks a run to stop, a signal or the end of the job: noted at once, obeyed by all ranks at a step boundary."""

from __future__ import annotations

import os
import signal
import time

# TERM: torchrun, Kubernetes, scancel. USR1: `sbatch --signal=USR1@120`. INT: Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Ctrl-C reaches a worker twice, from the terminal and forwarded by torchrun: signals this close are one request.
ONE_REQUEST_SECONDS = 2.0


class StopRequest:
    """Context manager that notes stop signals instead of dying of them; a second one ends the process at once.

    Args:
        deadline: time.time() from which on a stop is wanted as well; None: never.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._deadline = deadline
        self._received_at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def wanted(self) -> bool:
        """Whether a signal has come or the deadline has passed."""
        return self.received is not None or (self._deadline is not None and time.time() >= self._deadline)

    def _note(self, number: int, frame) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at > ONE_REQUEST_SECONDS:
            os._exit(128 + number)  # the shell's convention for death by signal
