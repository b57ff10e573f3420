"""How a command ends: one line for an error that the user can fix, and the exit status."""

from __future__ import annotations

import errno
import select
import signal
import sys
import time
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import TextIO

from cloze.launch.system.environment.launchers import Environment, read_environment
from cloze.launch.system.streams import drop, print_aside
from cloze.model.config import ModelError
from cloze.pipeline.errors import UserError, lacks_threads, reason_of
from cloze.pipeline.storage import describe
from cloze.pipeline.stores.temporary_folders import in_users_terms

EXIT_COMPLETE = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped early, start again to continue
# TERM: torchrun, Kubernetes, scancel. USR1: `sbatch --signal=USR1@120`. INT: Ctrl-C. HUP: a terminal that is closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# torchrun looks at its workers every 0.1 s (--monitor-interval), but a busy machine takes seconds to end a process.
SAID_SECONDS = 10.0
_LONGEST_LINE = 4000  # characters of a message; messages that list a user's names have some hundred
# Errors of the file system that a user can fix: no space, no permission, a file that was removed meanwhile, a folder in
# the place of a file or a file in the place of a folder, a link to itself, a name that is too long, a disk or a server
# of files that fails, standard output that is open for reading alone. One of a full disk or of a read names no file.
_FAILING = {errno.EIO, errno.ESTALE}
_OF_NO_NAME = _FAILING | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_USERS_TO_FIX = _OF_NO_NAME | {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR, errno.ENOTDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EBADF),
}


def heard_signals() -> tuple[signal.Signals, ...]:
    """STOP_SIGNALS, without SIGHUP where `nohup` has started this process."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


class Ending:
    """Context around a command: errors that need no traceback become a line on standard error and a `status`."""

    status = 0
    """Exit status of the command: what it returns, or that of its error."""

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, SystemExit):
            error = _flushed() or error
        status = self._status_of(error)
        if status is None:
            return False
        self.status = status
        # Not at Ctrl-C: a reader that stands still would keep the process, and the next one would be a traceback.
        if not isinstance(error, KeyboardInterrupt) and isinstance(_flushed(), OSError):
            drop(sys.stdout)
        return True

    def _status_of(self, error: BaseException | None) -> int | None:
        """Exit status for an error that was reported here; None: there is no error, or one that needs a traceback."""
        if isinstance(error, BrokenPipeError):
            if not _reader_is_gone(sys.stdout):
                return None
            drop(sys.stdout)
            return 128 + signal.SIGPIPE  # the shell's convention for what dies of it
        # Of a command that has nothing to save; others have a StopRequest. While a class is made, at imports, Python
        # before 3.12 makes it the cause of a RuntimeError.
        if isinstance(error, KeyboardInterrupt) or error and isinstance(error.__cause__, KeyboardInterrupt):
            _print_error("stopped by Ctrl-C")
            return 128 + signal.SIGINT
        if isinstance(error, OSError) and error.errno in (_OF_NO_NAME if error.filename is None else _USERS_TO_FIX):
            read = error.errno in _FAILING
            where = "a file that was read" if read else "a file that was written below --output or TMPDIR"
            return _end_with_line(describe(error, where))
        if isinstance(error, (UserError, ModelError)):
            return _end_with_line(str(error))
        if isinstance(error, (RuntimeError, MemoryError)) and out_of_memory(error):
            return _end_with_line(
                f"memory: found too little ({reason_of(error)}), expected more than the model, its states and a batch "
                "take; choose a smaller model, --train.micro_batch_size or length (cloze plan says what they take)"
            )
        if isinstance(error, Exception) and lacks_threads(error):
            return _end_with_line(
                f"threads: found no room for another ({reason_of(error)}), expected some; raise `ulimit -u`, "
                "`ulimit -v` or the container's limit of processes or memory"
            )
        if isinstance(error, RuntimeError) and (line := _line_of_loss(error)) is not None:
            _let_others_speak()  # launchers usually end this process first: one line is enough
            _print_error(f"error: {line}")
            return EXIT_FAILURE
        return None


def _flushed() -> OSError | KeyboardInterrupt | None:
    """Flush standard output; returns what has kept it from that: at the exit an error would change the status."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except (OSError, KeyboardInterrupt) as error:
        return error
    return None


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation has failed; on the host torch reports it only in the message."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported for this
    return named or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _distributed() -> ModuleType | None:
    """distributed.py if it is imported: it is not for an error's sake, and torch with it."""
    return sys.modules.get("cloze.launch.system.distributed")


def _end_with_line(line: str) -> int:
    """Print an error that the user can fix. Launchers end all ranks when one exits, so it matters who waits.

    Before the process group exists all ranks usually have the same error: rank 0 prints it, and the launcher ends the
    others before they do. Later each rank prints its own error, and none exits before the others have printed theirs.
    """
    distributed = _distributed()
    have_met = distributed is not None and distributed.have_met()
    try:
        environment = read_environment()
    except UserError:  # the environment may be what is wrong
        environment = Environment()
    if not have_met and not environment.is_main:
        _let_others_speak()
    _print_error(f"error: {line}")
    if have_met and environment.world_size > 1:
        _let_others_speak()
    return EXIT_USER_ERROR


def _let_others_speak() -> None:
    """Wait; who presses Ctrl-C has seen enough."""
    with suppress(KeyboardInterrupt):
        time.sleep(SAID_SECONDS)


def _print_error(line: str) -> None:
    try:
        print_aside(_on_one_line(in_users_terms(line)))
    except OSError:  # standard error is a file on a full disk: the status is all that is left to say
        drop(sys.stderr)


def _on_one_line(text: str) -> str:
    """A message without the line ends and the terminal's commands that names in a hostile file hold, and its middle
    left out if it is very long.
    """
    text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 2 :]}"


def _line_of_loss(error: RuntimeError) -> str | None:
    """The message for an error caused by the end of other processes, which print the reason; else None."""
    distributed = _distributed()
    if distributed is None or not distributed.lost_others(error):
        return None
    return (
        f"rank {read_environment().rank}: found other processes gone, expected them in a collective "
        f"({reason_of(error)}); see the message of the process that ended first"
    )


def _reader_is_gone(output: TextIO) -> bool:
    """Whether the reader of a pipe is gone, as with `| head`."""
    ends = select.poll()
    try:
        ends.register(output, 0)  # errors are printed without being polled
    except (TypeError, ValueError):  # no file of the system's: a notebook's, or none at all
        return False
    return bool(ends.poll(0))
