"""Standard output and error whose reader is gone: of a pipe, or at a terminal that is closed."""

import errno
import io
import os
import select
import sys
import termios
from contextlib import suppress
from typing import Any, TextIO

from cloze.pipeline.errors import STANDARD_STREAMS


class _Writer(io.FileIO):
    """Writes to a file descriptor of standard output or error.

    Where that is a terminal and it is closed, what is written goes nowhere from then on. That alone stops no command: a
    shell sends SIGHUP to those that are to stop, and not to those that were told to go on without it (`disown`). Any
    other error names the stream, except BrokenPipeError.

    All is written, or there is an error: with `python -u` nobody else writes what a disk that fills has left over, and
    another process may have made a pipe or a terminal non-blocking.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, content: Any, /) -> int:
        left = memoryview(content).cast("B")
        size = len(left)
        try:
            while left:
                written = super().write(left)
                if written is None:  # there is no room now
                    select.select([], [self], [])
                left = left[written or 0 :]
        except OSError as error:
            if error.errno == errno.EIO and _is_closed_terminal(self.fileno()):
                _drop(self.fileno())
            else:
                if not isinstance(error, BrokenPipeError):
                    error.filename = STANDARD_STREAMS[self.fileno()]
                raise
        return size


class Aside(io.TextIOBase):
    """Standard error, for bars and lines beside a command's output: when nobody reads it any more, which is no error of
    the command, they go nowhere.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr  # which rich replaces while a bar is shown
        self.has_reader = True
        """Whether there may be a reader. One who has closed the terminal counts as one (`_Writer`)."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write all of the text by one call: other processes write to the same terminal."""
        try:
            print(text, end="", file=self._stream, flush=True)
        except OSError as error:
            closed = _is_closed_terminal(self._stream.fileno())  # in a program of the user's, which has no `_Writer`
            if not (closed or isinstance(error, BrokenPipeError)):
                raise
            drop(self._stream)
            self.has_reader = closed
        return len(text)


def print_aside(line: str) -> bool:
    """Print a line on standard error; returns False if its reader is found gone."""
    aside = Aside()
    aside.write(f"{line}\n")
    return aside.has_reader


def print_line(line: str) -> None:
    """Print a line on standard output.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    # One write call: other processes write to the same terminal, and print() may write the line's end by itself.
    print(f"{line}\n", end="", flush=True)


def outlive_terminals() -> None:
    """Make what is printed on terminals that are closed, or that will be, go nowhere (see `_Writer`)."""
    drop_closed_terminals()
    sys.stdout, sys.stderr = (_outliving(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr)))


def _outliving(stream: TextIO, number: int) -> TextIO:
    """The stream with a `_Writer`; itself, if it is none of Python's own on this descriptor (that of a notebook)."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # with `python -u` there is no buffer
    if type(raw) is not io.FileIO or raw.fileno() != number or not isinstance(stream, io.TextIOWrapper):
        return stream
    writer = _Writer(number)
    return io.TextIOWrapper(
        writer if raw is buffer else io.BufferedWriter(writer),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def drop_closed_terminals() -> None:
    """Let what is printed on closed terminals go nowhere: also by libraries of other languages."""
    for number in STANDARD_STREAMS:
        if _is_closed_terminal(number):
            _drop(number)


def drop(stream: TextIO) -> None:
    """Let what is printed to a stream from now on go nowhere, and what is left in its buffer, whose flush at the end of
    the process would change the exit status. An object of a program's own, without a descriptor, is left as it is.
    """
    with suppress(io.UnsupportedOperation, AttributeError):
        _drop(stream.fileno())


def _drop(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def _is_closed_terminal(number: int) -> bool:
    """Whether a file descriptor is of a terminal that is closed."""
    try:
        termios.tcgetattr(number)
    except termios.error as error:
        return error.args[0] == errno.EIO  # what is no terminal has another one
    return False
