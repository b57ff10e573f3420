"""Steps that change nothing, because their loss or gradient is infinite or NaN: what a run keeps, and when it ends.

The outcome of a step is known only when the device has done it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from cloze.launch.checkpoint.state import TrainState
from cloze.launch.training.metric_sums import MetricWindow
from cloze.pipeline.errors import UserError


class Awaited(Protocol):
    """Numbers that are being copied from the device."""

    def take(self) -> list[float]:
        """The numbers; waits for the copy."""


@dataclass(frozen=True)
class PendingStep:
    """A step that is done or queued on the device: whether it was skipped, and the state that a checkpoint after it
    would hold.
    """

    skipped: Awaited
    """Whether its loss or gradient was infinite or NaN."""
    state: TrainState
    window: Tensor
    position: int
    """Position of the first sample of the step in the stream."""

    def __str__(self) -> str:
        return (
            f"step {self.state.step}, on samples {self.position:,} to {self.state.samples_consumed - 1:,} of the "
            f"stream (epoch {self.state.epoch})"
        )


class SkippedTooOften(Exception):
    """As many steps in a row as are allowed were skipped; `step` is the last of them."""

    def __init__(self, step: PendingStep) -> None:
        super().__init__(str(step))
        self.step = step

    def error(self, allowed: int, checkpoints: Sequence[int]) -> UserError:
        """The error that ends the run.

        Args:
            allowed: `train.max_skipped_steps`.
            checkpoints: steps of the checkpoints that are there.
        """
        kept = ", ".join(map(str, checkpoints))
        return UserError(
            f"train.learning_rate: found {allowed} steps in a row whose loss or gradient are infinite or NaN, the last "
            f"being {self.step}, expected fewer (train.max_skipped_steps); lower the rate, lengthen the warmup or look "
            f"at the data; checkpoints are there of steps {kept}: remove those that are too late to continue from"
        )


class TrainProgress:
    """State and window after the last step, after the last good one, and steps whose outcome is not known yet.

    Args:
        most_skipped: consecutive skipped steps after which the run must end.
        keeps_skipped: whether a skipped step changes the state of a checkpoint, as in fp16, where it lowers the loss
            scale.
        warn: called with a line about each skipped step.
    """

    def __init__(
        self, window: MetricWindow, *, most_skipped: int, keeps_skipped: bool, warn: Callable[[str], None]
    ) -> None:
        self.state = TrainState()
        """After the last step that is done or queued."""
        self.window = window
        self.seconds = 0.0
        """Of the run by rank 0's clock, as all ranks know them."""
        self.skipped_in_a_row = 0
        self.saved: TrainState | None = None
        """The state of the newest checkpoint."""
        self._pending: deque[PendingStep] = deque()  # oldest first
        self._good = self.state, self.window.values.clone()
        self._most_skipped, self._keeps_skipped, self._warn = most_skipped, keeps_skipped, warn

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint."""
        return None if self.saved is None else self.saved.step

    @property
    def good(self) -> tuple[TrainState, Tensor]:
        """State and window after the last good step: what a checkpoint holds."""
        return self._good

    def resume(self, state: TrainState, windows: Sequence[Tensor]) -> None:
        """Go on from a checkpoint.

        Args:
            windows: values of the windows that this rank goes on with.
        """
        self.state = self.saved = state
        self.seconds = state.seconds
        for values in windows:
            self.window.add_saved(values)
        self.begin()

    def begin(self) -> None:
        """Take the current state and window as good."""
        self._good = self.state, self.window.values.clone()

    def add(self, skipped: Awaited, state: TrainState, position: int) -> None:
        """Add a queued step: its sums are in the window, and `state` is the state after it.

        Args:
            position: of its first sample in the stream.
        """
        self.state = state
        self._pending.append(PendingStep(skipped, state, self.window.values.clone(), position))

    def settle(self, leave: int = 0) -> None:
        """Read the outcomes of the steps, oldest first, and count the skipped ones.

        Args:
            leave: number of newest steps to leave for later: the last one may still run on a GPU, and the host need not
                wait for it.

        Raises:
            SkippedTooOften: all outcomes are then read: if newer steps were good, the weights include them.
        """
        failed = None
        while len(self._pending) > leave:
            step = self._pending.popleft()
            (skipped,) = step.skipped.take()
            if skipped:
                self.state = replace(self.state, skipped_steps=self.state.skipped_steps + 1)
                self.skipped_in_a_row += 1
                self._warn(f"loss or gradient of {step} are infinite or NaN; the step changes nothing")
            if not skipped or self._keeps_skipped:
                self._good = replace(step.state, skipped_steps=self.state.skipped_steps), step.window
            if not skipped:
                self.skipped_in_a_row = 0
            if self.skipped_in_a_row == self._most_skipped:
                failed, leave = step, 0
        if failed:
            raise SkippedTooOften(failed)

    def changed(self, state: TrainState) -> None:
        """Take another state between two steps (after an evaluation), and as good if the last step was good."""
        self.state = state
        self.window_changed()

    def window_changed(self) -> None:
        """Take the current window as good if the last step was good."""
        if self._good[0].step == self.state.step:
            self.begin()
