"""How far a run has come: its state, sums since the last line of metrics, and steps whose outcome is not known yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from cloze.launch.checkpoint import TrainState
from cloze.launch.system import distributed
from cloze.launch.system.devices import numbers_on


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

    def __init__(self, step: Step) -> None:
        super().__init__(str(step))
        self.step = step


@dataclass(frozen=True)
class WindowSums:
    """Sums over all ranks and over the steps since the last line of metrics."""

    objective: list[float]
    """Sums in the order of the objective's NAMES."""
    sources: list[float]
    """Sums of the measures of a mixture's sources."""
    steps: float
    """Steps that changed the weights: a whole number but for rounding."""
    tokens: float
    padding: float
    """Tokens that padding would have added."""


class Window:
    """Sums of this rank since the last line of metrics, on the device; saved in checkpoints as one tensor.

    Args:
        num_objective: length of the objective's sums.
        num_sources: length of the sums of sources; 0 without a mixture.
    """

    _COUNTS = 4  # steps that changed the weights, skipped steps, tokens, padding

    def __init__(self, num_objective: int, num_sources: int, device: torch.device) -> None:
        self._sizes = num_objective, num_sources, self._COUNTS
        self.values = torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)

    def add(self, sums: Tensor, skipped: Tensor, world_size: int, tokens: int, padding: int) -> None:
        """Add a step. A skipped one counts its tokens; its losses, which may be NaN, are left out.

        Args:
            sums: float64, of the objective and the sources, of this rank.
            skipped: float64 (1,), 0 or 1, alike on all ranks.
        """
        share = 1 / world_size
        counts = numbers_on(self.values.device, tokens, padding)
        self.values += torch.cat([torch.where(skipped > 0, 0.0, sums), (1 - skipped) * share, skipped * share, counts])

    def add_saved(self, values: Tensor) -> None:
        """Add the sums of a checkpoint. Those of another shape had other sources: they are left out."""
        if values.shape == self.values.shape:
            self.values += values.to(self.values.device)

    def take(self) -> WindowSums:
        """The sums over all ranks; begins a new window. Collective."""
        sums = iter(distributed.reduce_sum(self.values.clone()).tolist())
        self.values.zero_()
        objective, sources, (steps, _, tokens, padding) = (list(islice(sums, size)) for size in self._sizes)
        return WindowSums(objective, sources, steps, tokens, padding)


class TrainProgress:
    """State and window after the last step, after the last good one, and steps whose outcome is not known yet.

    Args:
        most_skipped: consecutive skipped steps after which the run must end.
        keeps_skipped: whether a skipped step changes the state of a checkpoint, as in fp16, where it lowers the loss
            scale.
        on_skip: called with each skipped step.
    """

    def __init__(
        self, window: Window, *, most_skipped: int, keeps_skipped: bool, on_skip: Callable[[Step], None]
    ) -> None:
        self.state = TrainState()
        """After the last step that is done or queued."""
        self.window = window
        self.seconds = 0.0
        """Of the run by rank 0's clock, as all ranks know them."""
        self.skipped_in_a_row = 0
        self.saved: TrainState | None = None
        """The state of the newest checkpoint."""
        self._pending: deque[Step] = deque()  # oldest first
        self._good = self.state, self.window.values.clone()
        self._most_skipped, self._keeps_skipped, self._on_skip = most_skipped, keeps_skipped, on_skip

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
        self._pending.append(Step(skipped, state, self.window.values.clone(), position))

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
                self._on_skip(step)
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
