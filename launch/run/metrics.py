"""Writes the curves, pictures and texts of a run: metrics.jsonl, TensorBoard and other trackers."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from cloze.launch.run.runs import METRICS, kept_lines, lines_of
from cloze.launch.run.trackers import TRACKERS, Tracking, tracked
from cloze.launch.system.console import Console
from cloze.pipeline.storage import publish_text, readable_errors

_EMBEDDINGS = "word_embeddings"
# A loss is marked that lies this many median deviations above the running median, and this share of it: the first
# lets pass what is usual in this run, the second what is small in any.
_SPIKE_DEVIATIONS = 6
_SPIKE_SHARE = 0.05
_SPIKE_WINDOW = 20  # lines; the first half of it marks nothing


# TensorBoard sorts groups of curves by name, digits first, and shows the first ones: here what a first look is for.
_OVERVIEW = ("train/loss", "validation/loss", "train/mlm_accuracy", "validation/mlm_accuracy", "train/learning_rate",
             "speed/tokens_per_second")


def tensorboard_command(folder: Path) -> str:
    """What shows a run's curves. Of the folder around it: TensorBoard names runs from there, a folder itself `.`."""
    return shlex.join(["tensorboard", "--logdir", str(folder.parent)])


class MetricsWriter:
    """Writes scalars of a run; on a resume what lies beyond the resumed step is dropped, so that no curve overlaps.

    Args:
        step: the step that the run goes on from; lines of later steps are removed, and TensorBoard is made to
            forget later events (`purge_step`).
        evaluated_step: the last evaluation that the run knows of; lines of later ones are removed too.
        metric: which `validation/...` curve decides what is best; TensorBoard's first group has it too.
        trackers: where they go beside metrics.jsonl: "tensorboard" and names of trackers.TRACKERS.
        project: of the trackers that have such a thing.
        facts: what the trackers show of the run, by dotted names.
        kept: what the checkpoint that the run goes on from says of the trackers (`tracked`).
    """

    def __init__(self, folder: Path, step: int = 0, evaluated_step: int = -1, metric: str = "loss",
                 trackers: Sequence[str] = ("tensorboard",), project: str = "",
                 facts: dict[str, Any] | None = None, kept: Mapping[str, dict] = MappingProxyType({})) -> None:
        path = folder / METRICS
        lines = _truncate(path, step, evaluated_step) if path.exists() else []
        self._folder = folder
        shown = dict.fromkeys((*_OVERVIEW[:4], f"validation/{metric}", *_OVERVIEW[4:]))
        self._overview = {name: f"0_overview/{number}_{name.replace('/', '_')}"
                          for number, name in enumerate(shown, start=1)}
        losses = (line["train/loss"] for line in lines if line.get("train/loss") is not None)
        self._losses = deque(losses, maxlen=_SPIKE_WINDOW)
        threading.excepthook = _report_thread
        with readable_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
            self._board = (SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
                           if "tensorboard" in trackers else None)
        self._tracking = [
            Tracking(name, TRACKERS[name](project), folder, facts or {}, Console().warn, kept.get(name, {}))
            for name in trackers if name in TRACKERS]

    def write(self, step: int, scalars: dict[str, float]) -> dict[str, float]:
        """Append one line and one event a scalar; both are flushed.

        Returns:
            What was written: with `train/loss_spike`, the loss over its running median, where it is far above it.
        """
        if "train/loss" in scalars:
            loss = scalars["train/loss"]
            if (ratio := _spike(loss, self._losses)) is not None:
                scalars = scalars | {"train/loss_spike": ratio}
            self._losses.append(loss)
        with readable_errors(self._folder):
            # JSON has no word for infinity and NaN, which a validation loss may be.
            known = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
            self._file.write(json.dumps({"step": step, **known}) + "\n")
            self._file.flush()
            if self._board:
                for name, value in scalars.items():
                    self._board.add_scalar(name, value, step)
                    if name in self._overview:
                        self._board.add_scalar(self._overview[name], value, step)
                self._board.flush()
        for each in self._tracking:
            each.write(step, scalars)
        return scalars

    def tracked(self) -> dict[str, dict]:
        """By which a run that goes on finds its curves in the trackers: kept in each checkpoint."""
        return tracked(self._folder) if self._tracking else {}

    def describe(self, step: int, config: str, values: dict[str, object]) -> None:
        """The configuration: whole as a text, and single values for TensorBoard's table of hyper-parameters.

        Args:
            step: that the run goes on from. The text is shown there; the table has a run's values once, those that it
                began with: of several TensorBoard would take the first.
        """
        self.text("config", step, f"```yaml\n{config}```")
        if step or not self._board:
            return
        known = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
        # The table shows a run by a curve of it: the one that every run has. Not the last part: that it has ended well.
        for part in hparams(known, {"train/loss": 0.0})[:2]:
            writer = self._board.file_writer
            assert writer is not None, "it is open"
            writer.add_summary(part)

    def text(self, name: str, step: int, markdown: str) -> None:
        """A page of TensorBoard's text panel."""
        if not self._board:
            return
        with readable_errors(self._folder):
            self._board.add_text(name, markdown, step)
            self._board.flush()

    def precision_recall(self, name: str, step: int, labels: list[int], probabilities: list[float]) -> None:
        """A curve in TensorBoard's panel of them: labels 0 and 1, and the probability of 1."""
        if not self._board:
            return
        with readable_errors(self._folder):
            self._board.add_pr_curve(name, np.array(labels), np.array(probabilities), step)
            self._board.flush()

    def embeddings(self, step: int, vectors: torch.Tensor, names: list[str]) -> None:
        """A snapshot for TensorBoard's projector: vectors (N, hidden), a name each."""
        if not self._board:
            return
        with readable_errors(self._folder):
            self._board.add_embedding(vectors, metadata=names, global_step=step, tag=_EMBEDDINGS)
            # torch lists those of this process alone, and the projector shows what is listed.
            found = sorted(path.parent.relative_to(self._folder) for path in
                           self._folder.glob(f"*/{_EMBEDDINGS}/tensors.tsv"))
            publish_text(self._folder / "projector_config.pbtxt", "".join(
                f'embeddings {{\n tensor_name: "{_EMBEDDINGS}:{path.parent}"\n tensor_path: "{path}/tensors.tsv"\n'
                f' metadata_path: "{path}/metadata.tsv"\n}}\n' for path in found
            ))
            self._board.flush()

    def close(self, complete: bool = False) -> None:
        """Close the files and the trackers, with whether the run is complete."""
        for each in self._tracking:
            each.close(complete)
        with readable_errors(self._folder):
            self._file.close()
            if self._board:
                self._board.close()


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Python's own report of a thread that has failed, but for TensorBoard's: its writer raises the error again."""
    if type(failed.thread).__module__ != event_file_writer.__name__:
        threading.__excepthook__(failed)


def _spike(loss: float, before: deque[float]) -> float | None:
    """The loss over the median of those before it, if it stands out far above them; else None."""
    if len(before) < _SPIKE_WINDOW // 2:
        return None
    median = statistics.median(before)
    if median <= 0:
        return None  # of which nothing is a multiple: an objective of one's own may reach 0
    deviation = statistics.median(abs(value - median) for value in before)
    above = loss - median
    return loss / median if above > max(_SPIKE_DEVIATIONS * deviation, _SPIKE_SHARE * median) else None


def _truncate(path: Path, step: int, evaluated_step: int) -> list[dict]:
    """Keep what a metrics.jsonl says of steps up to that which the run goes on from; damaged lines are reported.

    Returns: the lines that stay.
    """
    lines, damaged = lines_of(path.read_bytes())
    if damaged:
        Console().warn(f"{path}: found {damaged} damaged lines, expected the figures of a step in each; left them out")
    kept = kept_lines(lines, step, evaluated_step)
    publish_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
