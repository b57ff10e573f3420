"""What asks a run to stop, a signal or the end of the job: noted at once, obeyed by all ranks at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

# TERM: torchrun, Kubernetes, scancel. USR1: `sbatch --signal=USR1@120`. INT: Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Ctrl-C reaches a worker twice, from the terminal and forwarded by torchrun: signals this close are one request.
ONE_REQUEST_SECONDS = 2.0
# What a process that has stopped may take to end, in which further copies of the signal are heard by nobody.
ENDING_SECONDS = 30.0


class StopRequest:
    """Context manager that notes stop signals instead of dying of them; a second one ends the process at once.

    Once one has come this stays so until the process has ended, which it is about to do: a late copy of the signal, for
    the rank that was the quickest to stop, must not take its exit status.

    Args:
        deadline: time.time() from which on a stop is wanted as well; None: never.
        say: takes the line that acknowledges the first signal at once, however long the step takes; a thread calls it.
    """

    def __init__(self, deadline: float | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        self.received: signal.Signals | None = None
        self._deadline, self._say = deadline, say
        self._previous: dict[int, object] = {}
        self._pipe = self._previous_pipe = -1
        self._deaf_until: float | None = None  # set by the first signal

    def __enter__(self) -> StopRequest:
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # A handler runs between two steps of Python alone: not in a collective that hangs, where a second signal is
        # needed most. The number of each signal goes into the pipe at once, and a thread reads it.
        self._previous_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._end_at_the_second, args=(reading,), daemon=True).start()
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        if self.received is not None:
            self._deaf_until = time.monotonic() + ENDING_SECONDS
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_pipe)
        os.close(self._pipe)  # which ends the thread

    @property
    def wanted(self) -> bool:
        """Whether a signal has come or the deadline has passed."""
        return self.received is not None or (self._deadline is not None and time.time() >= self._deadline)

    def _note(self, number: int, frame) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    def _end_at_the_second(self, reading: int) -> None:
        """Read the numbers of signals until the pipe is closed; end the process at one that is no part of the first."""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] not in SIGNALS:
                    continue
                now = time.monotonic()
                if self._deaf_until is None:
                    self._deaf_until = now + ONE_REQUEST_SECONDS
                    line = (f"{signal.Signals(number[0]).name}: stopping after this step, with a checkpoint; a second "
                            "signal ends the run at once, without")
                    # Aside: an output that nobody reads must not keep the second signal from being heard.
                    threading.Thread(target=self._say, args=(line,), daemon=True).start()
                elif now > self._deaf_until:
                    os._exit(128 + number[0])  # the shell's convention for death by signal
