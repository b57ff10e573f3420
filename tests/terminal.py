"""A terminal for what looks otherwise on one."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def terminal() -> Iterator[tuple[TextIO, bytearray]]:
    """A stream that is a terminal, and what it was sent: complete when the block has ended."""
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(ours, 1 << 16):
                shown.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w") as stream:
            yield stream, shown
    finally:
        reader.join()
        os.close(ours)
