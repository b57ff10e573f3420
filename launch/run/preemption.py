"""Requests to stop a run, by a signal or by the end of the job: recorded at once, acted on by all ranks at a step
boundary.

Before its first step a run has nothing to save: there a signal ends it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

# TERM: torchrun, Kubernetes, scancel. USR1: `sbatch --signal=USR1@120`. INT: Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped early, start again to continue

# Ctrl-C reaches a worker twice, from the terminal and forwarded by torchrun: signals this close are one request.
ONE_REQUEST_SECONDS = 2.0
# What a process that has stopped may take to end, in which further copies of the signal are ignored.
ENDING_SECONDS = 30.0
# How long a last line may take.
SAYING_SECONDS = 5.0


class _SignalThread:
    """A thread that hands on the numbers of stop signals.

    A handler runs between two steps of Python alone: not in a collective that hangs, nor in an import that loads a
    library. The number of each signal goes into a pipe at once, and the thread reads it.

    Args:
        on_signal: is given the number of each, by the thread.
        handle: what is called between two steps of Python.
    """

    def __init__(self, on_signal: Callable[[int], None], handle: Callable[[int, object], None]) -> None:
        self._on_signal = on_signal
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._previous_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        self._previous = {number: signal.signal(number, handle) for number in SIGNALS}

    def close(self) -> None:
        """Signals are what they were before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_pipe)
        os.close(self._pipe)  # which ends the thread

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in SIGNALS:
                    self._on_signal(number[0])


class Starting:
    """Context manager around all that comes before a run's first step: a signal ends the process there, with a line and
    the status of a stop. It ends where a StopRequest begins.

    Args:
        say: takes the line; a thread calls it.
    """

    _current: ClassVar[Starting | None] = None  # of this process

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._signals: _SignalThread | None = None

    def __enter__(self) -> Starting:
        Starting._current = self
        self._signals = _SignalThread(self._end, lambda number, frame: None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    @classmethod
    def leave(cls) -> None:
        """From here on signals are somebody else's."""
        current, cls._current = cls._current, None
        if current is not None and current._signals is not None:
            current._signals.close()

    def _end(self, number: int) -> None:
        # status.json stays: launchers send the same signal where another process could not start, which a job that is
        # asked for again would repeat for ever.
        line = (f"{signal.Signals(number).name}: stopped before the first step of this start, with nothing to save; "
                "the same command starts it again")
        saying = threading.Thread(target=self._say, args=(line,), daemon=True)  # an output may have no reader
        saying.start()
        saying.join(SAYING_SECONDS)
        os._exit(EXIT_REQUEUE)


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
        self._signals: _SignalThread | None = None
        self._ignored_until: float | None = None  # set by the first signal

    def __enter__(self) -> StopRequest:
        Starting.leave()
        self._signals = _SignalThread(self._end_at_the_second, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.received is not None:
            self._ignored_until = time.monotonic() + ENDING_SECONDS
        elif self._signals is not None:
            self._signals.close()

    @property
    def wanted(self) -> bool:
        """Whether a signal has come or the deadline has passed."""
        return self.received is not None or (self._deadline is not None and time.time() >= self._deadline)

    def _note(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    def _end_at_the_second(self, number: int) -> None:
        """Acknowledge the first signal; end the process at one that is no part of it."""
        now = time.monotonic()
        if self._ignored_until is None:
            self._ignored_until = now + ONE_REQUEST_SECONDS
            line = (f"{signal.Signals(number).name}: stopping after this step, with a checkpoint; a second "
                    "signal ends the run at once, without")
            # Aside: an output that is not read must not block the second signal.
            threading.Thread(target=self._say, args=(line,), daemon=True).start()
        elif now > self._ignored_until:
            os._exit(128 + number)  # the shell's convention for death by signal
