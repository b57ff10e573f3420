"""Requests to stop a run, by a signal, the job's time limit or the end of who reads its output: recorded at once, acted
on at a step boundary.

All ranks act on a request at the same step. Before its first step a run has nothing to save, and a signal ends it at
once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from cloze.launch.system.environment.parents import has_lost_launcher
from cloze.launch.system.exit_status import EXIT_REQUEUE, STOP_SIGNALS, heard_signals
from cloze.launch.system.streams import drop_closed_terminals

# Ctrl-C reaches a worker twice, from the terminal and from torchrun: signals within this time are one request.
ONE_REQUEST_SECONDS = 2.0
# Seconds that a stopped process has to end, in which further copies of the signal are ignored.
ENDING_SECONDS = 30.0
STOPPING = "stopping after this step, with a checkpoint"
# Seconds that the last line may take to be written, and a lease to be removed.
SAYING_SECONDS = 5.0


def _cause(number: int) -> str:
    """What a stop signal is due to, for a message."""
    if number == signal.SIGTERM and has_lost_launcher():
        return "the launcher has ended (torchrun, deepspeed, or the `cloze` with --processes)"
    return signal.Signals(number).name


def _try_to_say(say: Callable[[str], None], line: str) -> None:
    """Say a line to a reader who may be gone."""
    with suppress(OSError):
        say(line)


class _SignalThread:
    """A thread that receives the numbers of stop signals.

    A Python signal handler runs only between two bytecode instructions: not during a collective that hangs, nor while
    an import loads a library. The number of each signal is written to a pipe at once, and the thread reads it.

    Args:
        on_signal: called by the thread with the number of each signal.
        handle: the Python signal handler.
    """

    def __init__(self, on_signal: Callable[[int], None], handle: Callable[[int, object], None]) -> None:
        self._on_signal = on_signal
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._previous_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        self._previous = {number: signal.signal(number, handle) for number in heard_signals()}

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_pipe)
        os.close(self._pipe)  # which ends the thread

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in STOP_SIGNALS:
                    if number[0] == signal.SIGHUP:
                        drop_closed_terminals()
                    self._on_signal(number[0])


class Starting:
    """Context manager around a command that may be stopped. Before its first step a signal ends the process with a line
    and the exit status of a stop; a StopRequest replaces that, and leaves signals ignored when its part is done.

    Args:
        say: called with the line, by a thread.
    """

    _current: ClassVar[Starting | None] = None  # the one of this process
    _releases: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._signals: _SignalThread | None = None
        self.done: StopRequest | None = None
        """The one that has replaced this and is left."""

    def __enter__(self) -> Starting:
        Starting._current = self
        self._signals = _SignalThread(self._end, lambda number, frame: None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        if self.done is not None:
            self.done.close()

    @classmethod
    def leave(cls) -> Starting | None:
        """Stop handling signals, which something else handles from now on; returns who has handled them."""
        current, cls._current = cls._current, None
        cls._releases.clear()
        if current is not None and current._signals is not None:
            current._signals.close()
        return current

    @classmethod
    def before_end(cls, release: Callable[[], object]) -> None:
        """Call `release` before a signal ends the process, which leaves no context by itself: a lease, which another
        machine would wait for.
        """
        cls._releases.append(release)

    def _end(self, number: int) -> None:
        # status.json is not changed: launchers send the same signal when another process could not start, and a
        # requeued job would repeat that forever.
        line = (
            f"{_cause(number)}: stopped before the first step of this start, with nothing to save; "
            "the same command starts it again"
        )
        lasts = [threading.Thread(target=_try_to_say, args=(self._say, line), daemon=True)]
        lasts += [threading.Thread(target=release, daemon=True) for release in self._releases]
        end = time.monotonic() + SAYING_SECONDS
        for last in lasts:
            last.start()
        for last in lasts:
            last.join(max(0.0, end - time.monotonic()))
        os._exit(EXIT_REQUEUE)


class StopRequest:
    """Context manager that records stop signals instead of ending the process; a second signal ends it at once.

    After a signal the handler stays in place until the process has ended: a late copy of the signal must not change the
    exit status of the rank that stopped first. Nor must one that comes when a command has said that it is complete:
    the handler stays until the command's Starting is left.

    Args:
        deadline: time.time() at which a stop is requested as well, by the clock as it is now; None: never.
        say: called, by a thread, with the line that acknowledges the first signal, without waiting for the step.
    """

    def __init__(self, deadline: float | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        self.received: signal.Signals | None = None
        self._lost_reader = False
        # in a time that a correction of the clock does not move
        self._deadline = None if deadline is None else time.monotonic() + deadline - time.time()
        self._say = say
        self._signals: _SignalThread | None = None
        self._ignored_until: float | None = None  # set by the first signal, and by the end
        self._command: Starting | None = None

    def __enter__(self) -> StopRequest:
        self._command = Starting.leave()
        self._signals = _SignalThread(self._end_at_the_second, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self.received is not None:
            self._ignored_until = time.monotonic() + ENDING_SECONDS
        elif self._command is not None and kind is None:
            self._ignored_until = time.monotonic() + ENDING_SECONDS
            self._command.done = self
        else:
            self.close()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._signals is not None:
            self._signals.close()

    def lose_reader(self) -> None:
        """Stop, since nobody reads what is printed any more."""
        self._lost_reader = True

    @property
    def wanted(self) -> bool:
        """Whether a signal has come, the deadline has passed or the output has lost its reader."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self.received is not None or self._lost_reader or late

    @property
    def cause(self) -> str:
        """What the stop of this process is due to, for a message; empty if nothing has asked it to stop."""
        if self.received is not None:
            return _cause(self.received)
        if self._lost_reader:
            return "the reader of the output is gone"
        return "the job's time is nearly over (train.stop_before_seconds)" if self.wanted else ""

    def _note(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    def _end_at_the_second(self, number: int) -> None:
        """Acknowledge the first signal; end the process at a later one that is not a copy of it."""
        now = time.monotonic()
        if self._ignored_until is None:
            self._ignored_until = now + ONE_REQUEST_SECONDS
            # In a thread: an output that nobody reads must not block the second signal.
            threading.Thread(target=self._acknowledge, args=(number,), daemon=True).start()
        elif now > self._ignored_until:
            os._exit(128 + number)  # the shell's convention for death by signal

    def _acknowledge(self, number: int) -> None:
        _try_to_say(self._say, f"{_cause(number)}: {STOPPING}; a second signal ends the run at once, without")
