"""Writes the curves, pictures and texts of a run: metrics.jsonl, TensorBoard and other trackers."""

import json
import math
import os
import shlex
import statistics
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from cloze.launch.run.metrics_file import BUFFER_BYTES, is_evaluation, is_kept, parsed_lines
from cloze.launch.run.runs import METRICS
from cloze.launch.run.tensorboard_files import report_no_writer
from cloze.launch.run.trackers import TRACKERS, Tracking, tracked
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text, publishing, readable_errors
from cloze.pipeline.untrusted import check_regular

_EMBEDDINGS = "word_embeddings"
# A loss is marked as a spike if it exceeds the running median by this many median absolute deviations and by this share
# of the median: the first ignores the run's usual noise, the second deviations that are small in any run.
_SPIKE_DEVIATIONS = 6
_SPIKE_SHARE = 0.05
_SPIKE_WINDOW = 20  # lines; no spikes are marked before half of the window is filled


# TensorBoard sorts groups of curves by name, digits first, and opens the first ones: the most important curves.
_OVERVIEW = (
    "train/loss",
    "validation/loss",
    "train/mlm_accuracy",
    "validation/mlm_accuracy",
    "train/learning_rate",
    "speed/tokens_per_second",
)


def tensorboard_command(folder: Path) -> str:
    """The command that shows a run's curves. It names the parent folder, since TensorBoard calls the folder itself
    `.`.
    """
    return shlex.join(["tensorboard", "--logdir", str(folder.parent)])


class MetricsWriter:
    """Writes scalars of a run; on a resume the entries after the resumed step are dropped, so that no curve overlaps.

    Args:
        step: the step that the run goes on from; lines of later steps are removed, and TensorBoard is made to
            forget later events (`purge_step`).
        evaluated_step: step of the last evaluation in the checkpoint; lines of later evaluations are removed too.
        metric: the `validation/...` curve that selects the best checkpoint; also shown in TensorBoard's first group.
        trackers: destinations besides metrics.jsonl: "tensorboard" and names of trackers.TRACKERS.
        project: project name for the trackers that have projects.
        facts: facts of the run for the trackers, by dotted names.
        kept: state of the trackers in the checkpoint that the run resumes from (`tracked`).
        num_lines: the lines up to that checkpoint, by `num_lines` when it was saved; None: not known.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        evaluated_step: int = -1,
        metric: str = "loss",
        trackers: Sequence[str] = ("tensorboard",),
        project: str = "",
        facts: Fields | None = None,
        kept: Mapping[str, Fields] = MappingProxyType({}),
        num_lines: int | None = None,
    ) -> None:
        path = folder / METRICS
        # Steps of the lines, ascending: of evaluations, and of all others.
        self._steps = {True: array("q"), False: array("q")}
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)
        self._predicted: tuple[bool, ...] = ()
        if path.exists():
            _truncate(path, step, evaluated_step, self._take_up)
        found = sum(map(len, self._steps.values()))
        if num_lines is not None and found != num_lines:
            what = "without those that are lost" if found < num_lines else "with those that were added"
            Console().warn(
                f"{path}: found {found} lines up to step {step}, expected the {num_lines} that were there when "
                f"the checkpoint was saved; the curve goes on {what}"
            )
        self._folder = folder
        shown = dict.fromkeys((*_OVERVIEW[:4], f"validation/{metric}", *_OVERVIEW[4:]))
        self._overview = {
            name: f"0_overview/{number}_{name.replace('/', '_')}" for number, name in enumerate(shown, start=1)
        }
        report_no_writer()
        with readable_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
            self._size = path.stat().st_size
            self._board = (
                SummaryWriter(str(folder), purge_step=step + 1 if step else 0) if "tensorboard" in trackers else None
            )
        self._tracking = [
            Tracking(name, TRACKERS[name](project), folder, facts or {}, Console().warn, kept.get(name, {}))
            for name in trackers
            if name in TRACKERS
        ]

    def write(self, step: int, scalars: dict[str, float]) -> dict[str, float]:
        """Append one line, and one TensorBoard event per scalar; both are flushed.

        Returns:
            The scalars that were written, with `train/loss_spike` (loss / running median) if the loss is a spike.
        """
        if "train/loss" in scalars:
            if (ratio := self._keep_for_spikes(scalars)) is not None:
                scalars = scalars | {"train/loss_spike": ratio}
        with readable_errors(self._folder):
            # JSON has no infinity and no NaN, which a validation loss may be.
            known = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
            self._size += self._file.write(json.dumps({"step": step, **known}) + "\n")  # ASCII
            self._file.flush()
            self._steps[is_evaluation(known)].append(step)
            if self._board:
                for name, value in scalars.items():
                    self._board.add_scalar(name, value, step)
                    if name in self._overview:
                        self._board.add_scalar(self._overview[name], value, step)
                self._board.flush()
        for tracker in self._tracking:
            tracker.write(step, scalars)
        return scalars

    def _take_up(self, line: Fields) -> None:
        """Note a line that an earlier start has written."""
        self._steps[is_evaluation(line)].append(line["step"])
        if line.get("train/loss") is not None:
            self._keep_for_spikes(line)

    def _keep_for_spikes(self, scalars: Mapping[str, float]) -> float | None:
        """Add a line's loss to those that later ones are compared with.

        The loss of masked tokens begins far above that of next tokens before them, and is not compared with it.

        Returns:
            The ratio of a spike.
        """
        predicted = tuple(f"train/{term}_loss" in scalars for term in ("next_token", "mlm"))
        if predicted != self._predicted:
            self._losses.clear()
            self._predicted = predicted
        ratio = _spike(scalars["train/loss"], self._losses)
        self._losses.append(scalars["train/loss"])
        return ratio

    def tracked(self) -> dict[str, Fields]:
        """The state by which a resumed run finds its curves in the trackers; kept in each checkpoint."""
        return tracked(self._folder) if self._tracking else {}

    def num_lines(self, step: int, evaluated_step: int) -> int:
        """Number of lines that a resume from a checkpoint of this state keeps (`kept_lines`)."""
        return bisect_right(self._steps[False], step) + bisect_right(self._steps[True], evaluated_step)

    def check_there(self) -> None:
        """Raise UserError if metrics.jsonl is not the file any more that this run has written."""
        path = self._folder / METRICS
        with readable_errors(path):
            found = path.stat() if path.exists() else None
            if not found or not os.path.samestat(os.fstat(self._file.fileno()), found) or found.st_size < self._size:
                raise UserError(
                    f"{path}: found {'another file' if found else 'no file'}, expected the one that this run has "
                    "written: it was removed, replaced or cut meanwhile, and the curve is lost; leave the folder alone "
                    "while a run uses it; the same command says what else is left"
                )

    def describe(self, step: int, config: str, values: dict[str, object]) -> None:
        """Write the configuration: whole as a text, and single values for TensorBoard's table of hyperparameters.

        Args:
            step: the step that the run resumes from, at which the text is shown. The table has a run's first values
                only: TensorBoard ignores later ones.
        """
        self.text("config", step, f"```yaml\n{config}```")
        if step or not self._board:
            return
        known = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
        # The table shows a run with one of its curves: the one that every run has, without the last part, which says
        # that the run is complete.
        for part in hparams(known, {"train/loss": 0.0})[:2]:
            writer = self._board.file_writer
            assert writer is not None, "it is open"
            writer.add_summary(part)

    def _on_board(self, write: Callable[[SummaryWriter], object]) -> None:
        """Write to TensorBoard, if the run does."""
        if self._board:
            with readable_errors(self._folder):
                write(self._board)
                self._board.flush()

    def text(self, name: str, step: int, markdown: str) -> None:
        """Write a page of TensorBoard's text panel."""
        self._on_board(lambda board: board.add_text(name, markdown, step))

    def precision_recall(self, name: str, step: int, labels: list[int], probabilities: list[float]) -> None:
        """Write a precision-recall curve to TensorBoard: labels 0 and 1, and the probabilities of label 1."""
        self._on_board(lambda board: board.add_pr_curve(name, np.array(labels), np.array(probabilities), step))

    def embeddings(self, step: int, vectors: torch.Tensor, names: list[str]) -> None:
        """Write a snapshot for TensorBoard's projector: vectors (N, hidden size) and their names."""

        def write(board: SummaryWriter) -> None:
            board.add_embedding(vectors, metadata=names, global_step=step, tag=_EMBEDDINGS)
            # torch lists only the snapshots of this process, and the projector shows only what is listed.
            snapshots = sorted(
                path.parent.relative_to(self._folder) for path in self._folder.glob(f"*/{_EMBEDDINGS}/tensors.tsv")
            )
            publish_text(
                self._folder / "projector_config.pbtxt",
                "".join(
                    f'embeddings {{\n tensor_name: "{_EMBEDDINGS}:{path.parent}"\n tensor_path: "{path}/tensors.tsv"\n'
                    f' metadata_path: "{path}/metadata.tsv"\n}}\n'
                    for path in snapshots
                ),
            )

        self._on_board(write)

    def close(self, complete: bool = False) -> None:
        """Close the files and the trackers.

        Args:
            complete: whether the run is complete.
        """
        for tracker in self._tracking:
            tracker.close(complete)
        with readable_errors(self._folder):
            self._file.close()
            if self._board:
                self._board.close()


def _spike(loss: float, before: deque[float]) -> float | None:
    """The loss divided by the median of the losses before it if it is a spike; else None."""
    if len(before) < _SPIKE_WINDOW // 2:
        return None
    median = statistics.median(before)
    if median <= 0:
        return None  # the ratio needs a positive median; a user's own objective may reach 0
    deviation = statistics.median(abs(value - median) for value in before)
    above = loss - median
    return loss / median if above > max(_SPIKE_DEVIATIONS * deviation, _SPIKE_SHARE * median) else None


def _truncate(path: Path, step: int, evaluated_step: int, take_up: Callable[[Fields], None]) -> None:
    """Remove the lines of a metrics.jsonl after the step that the run resumes from; damaged lines are reported.

    Args:
        take_up: called with each line that stays; one is in memory at a time.
    """
    check_regular(path)
    damaged = 0
    with open(path, "rb", BUFFER_BYTES) as file, publishing(path) as aside, open(aside, "w", encoding="utf-8") as kept:
        for line in parsed_lines(file):
            if line is None:
                damaged += 1
            elif is_kept(line, step, evaluated_step):
                kept.write(json.dumps(line) + "\n")
                take_up(line)
    if damaged:
        Console().warn(f"{path}: found {damaged} damaged lines, expected the figures of a step in each; left them out")
