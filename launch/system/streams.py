"""Standard output and error whose reader is gone."""

import os
import sys
from typing import TextIO


def print_aside(line: str) -> bool:
    """Print a line on standard error; returns False if nobody reads that any more, which is no error of the command."""
    try:
        # One write call: other processes write to the same terminal, and print() may write the line's end by itself.
        print(f"{line}\n", end="", file=sys.stderr, flush=True)
    except BrokenPipeError:
        drop(sys.stderr)
        return False
    return True


def drop(stream: TextIO) -> None:
    """Let what is printed to a stream from now on go nowhere, and what is left in its buffer, whose flush at the end of
    the process would change the exit status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
