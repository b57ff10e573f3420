"""TensorBoard's files; errors of its thread are lines too. Imports TensorBoard, and torch with it, with the first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cloze.pipeline.storage import readable_errors

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_ITS_WRITER = "tensorboard.summary.writer.event_file_writer"  # the module of its thread


@contextmanager
def board_in(folder: Path) -> Iterator[SummaryWriter]:
    """A writer of events in a folder. Raises UserError for an error of the file system, of its thread too."""
    from torch.utils.tensorboard import SummaryWriter

    report_no_writer()
    with readable_errors(folder), SummaryWriter(str(folder)) as board:
        yield board
        board.flush()


def report_no_writer() -> None:
    """Leave TensorBoard's thread out of Python's report of failed threads: its writer raises the error again."""
    threading.excepthook = _report


def _report(failed: threading.ExceptHookArgs) -> None:
    if type(failed.thread).__module__ != _ITS_WRITER:
        threading.__excepthook__(failed)
