"""Curves: TensorBoard events and metrics.jsonl, the same scalars under the same names."""

from __future__ import annotations

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from pipeline.storage import publish_text

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Writes scalars of a run; on a resume what lies beyond the resumed step is dropped, so that no curve overlaps.

    Args:
        step: the step that the run goes on from; lines of later steps are removed, and TensorBoard is told to
            forget later events (`purge_step`).
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        if path.exists():
            _truncate(path, step)
        self._file = open(path, "a", encoding="utf-8")
        self._board = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Append one line and one event a scalar; both are flushed."""
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read_metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; a last line that was cut short is left out."""
    lines = []
    for line in (folder / FILE_NAME).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _truncate(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step] if step else []
    publish_text(path, "".join(json.dumps(line) + "\n" for line in kept))
