"""Standard output and error whose reader is gone: of a pipe, or at a terminal that is closed."""

import errno
import io
import os
import sys
import termios
from typing import TextIO


class Aside(io.TextIOBase):
    """Standard error, for bars and lines beside a command's output: when nobody reads it any more, which is no error of
    the command, they go nowhere.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr  # which rich replaces while a bar is shown
        self.has_reader = True
        """Whether there may be a reader. One who has closed the terminal counts as one (`is_closed_terminal`)."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write all of the text by one call: other processes write to the same terminal."""
        try:
            print(text, end="", file=self._stream, flush=True)
        except OSError as error:
            if not (is_closed_terminal(error) or isinstance(error, BrokenPipeError)):
                raise
            drop(self._stream)
            self.has_reader = is_closed_terminal(error)
        return len(text)


def print_aside(line: str) -> bool:
    """Print a line on standard error; returns False if its reader is found gone."""
    aside = Aside()
    aside.write(f"{line}\n")
    return aside.has_reader


def print_line(line: str) -> None:
    """Print a line on standard output; at a closed terminal it goes nowhere.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    try:
        # One write call: other processes write to the same terminal, and print() may write the line's end by itself.
        print(f"{line}\n", end="", flush=True)
    except OSError as error:
        if not is_closed_terminal(error):
            raise
        drop(sys.stdout)


def is_closed_terminal(error: OSError) -> bool:
    """Whether a line could not be printed since the terminal is closed. That alone stops no command: a shell sends
    SIGHUP to those that are to stop, and not to those that were told to go on without it (`disown`).
    """
    return error.errno == errno.EIO and error.filename is None


def drop_closed_terminals() -> None:
    """Let what is printed on closed terminals go nowhere: bars too, which print by threads."""
    for number in (1, 2):
        try:
            termios.tcgetattr(number)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # what is no terminal has another one
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def drop(stream: TextIO) -> None:
    """Let what is printed to a stream from now on go nowhere, and what is left in its buffer, whose flush at the end of
    the process would change the exit status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
