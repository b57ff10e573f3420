"""Steps whose outcome (good or overflow step) is not known yet, the last good state, sums since the last log line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cloze.launch.checkpoint import TrainState


class Awaited(Protocol):
    """Numbers that are being copied from the device."""

    def take(self) -> list[float]:
        """The numbers; waits for the copy."""


@dataclass(frozen=True)
class Step:
    """A step that is done or queued on the device: whether it was skipped, and the state that a checkpoint after it
    would hold.
    """

    skipped: Awaited
    """Whether its loss or gradient was infinite or NaN."""
    state: TrainState
    window: torch.Tensor
    position: int
    """Of its first sample in the stream."""

    def __str__(self) -> str:
        return (
            f"step {self.state.step}, on samples {self.position:,} to {self.state.samples_consumed - 1:,} of the "
            f"stream (epoch {self.state.epoch})"
        )


class Outcomes:
    """Steps whose outcome is not known yet, the state after the last good step, and the last saved state.

    Args:
        size: number of sums in the window.
        most_skipped: consecutive skipped steps after which the run must end.
        keeps_skipped: whether a skipped step changes the state of a checkpoint, as in fp16, where it lowers the loss
            scale.
        on_skip: called with each skipped step.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        most_skipped: int,
        keeps_skipped: bool,
        on_skip: Callable[[Step], None],
    ) -> None:
        self.window = torch.zeros(size, dtype=torch.float64, device=device)
        """Sums since the last line of metrics, of this rank."""
        self.skipped_in_a_row = 0
        self.saved: TrainState | None = None
        """The state of the newest checkpoint."""
        self._pending: deque[Step] = deque()  # oldest first
        self._good = TrainState(), self.window.clone()
        self._most_skipped, self._keeps_skipped, self._on_skip = most_skipped, keeps_skipped, on_skip

    @property
    def good(self) -> tuple[TrainState, torch.Tensor]:
        """State and window after the last good step: what a checkpoint holds."""
        return self._good

    def begin(self, state: TrainState) -> None:
        """Set the good state to this state and the current window."""
        self._good = state, self.window.clone()

    def add(self, skipped: Awaited, state: TrainState, position: int) -> None:
        """Add a queued step: its sums are in the window, and `state` is the state after it."""
        self._pending.append(Step(skipped, state, self.window.clone(), position))

    def look(self, state: TrainState, leave: int = 0) -> tuple[TrainState, Step | None]:
        """Read the outcomes, oldest first; returns the state with the skipped steps counted, and the step at which
        there were too many in a row, or None.

        Args:
            leave: number of newest steps to leave for later: the last one may still run on a GPU, and the host need not
                wait for it.
        """
        failed = None
        while len(self._pending) > leave:
            step = self._pending.popleft()
            (skipped,) = step.skipped.take()
            if skipped:
                state = replace(state, skipped_steps=state.skipped_steps + 1)
                self.skipped_in_a_row += 1
                self._on_skip(step)
            if not skipped or self._keeps_skipped:
                self._good = replace(step.state, skipped_steps=state.skipped_steps), step.window
            if not skipped:
                self.skipped_in_a_row = 0
            if self.skipped_in_a_row == self._most_skipped:
                failed, leave = step, 0  # read the newer steps too: if they were good, the weights include them
        return state, failed

    def changed(self, state: TrainState) -> None:
        """Update the good state after a change between steps (such as an evaluation), if the last step was good."""
        if self._good[0].step == state.step:
            self.begin(state)
