"""What watches a run: the interface of our own watchers and of users' callbacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cloze.launch.checkpoint.state import TrainState
from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Outcome
from cloze.launch.run.preemption import StopRequest
from cloze.launch.training.totals import Agreed, Wishes
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class RunView:
    """The facts of a run that a callback can read."""

    model: nn.Module
    """The model in training mode, with the weights after the last step; whole in forward only at `zero.stage` 3."""
    device: torch.device
    """Device of the model."""
    rank: int
    """Rank of this process, from 0; rank 0 prints and writes."""
    world_size: int
    """Processes of the run."""
    state: TrainState
    """`step`, `samples_consumed`, `tokens`, `epoch` and `skipped_steps`, as a checkpoint would hold them now."""
    outcome: Outcome | None = None
    """Outcome of the last step, on the device: whether it was skipped, gradient norm, rate. None if none was made."""
    agreed: Agreed | None = None
    """The numbers, wishes included, that all ranks exchanged before that step. None if none was made."""
    stopping: bool = False
    """Whether the ranks have agreed to stop after this step, with a checkpoint."""


class Callback:
    """Watches a run. A subclass overrides the methods for the events that it needs.

    The constructor is called once in every process, before the process group exists, with the configuration of the run.
    Each method is called in every process at the same step, so that it may make collective calls (a forward of the
    model at `zero.stage` 3); only rank 0 should print and write. An exception ends the run, a
    `cloze.pipeline.errors.UserError` with a one-line message. Time spent in a method is time of the run.

    What changes the course of the run (a stop, a checkpoint) has to be done by all ranks at the same step: a callback
    says it in `wishes`, and the ranks agree on it in the exchange of numbers that each step begins with.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def on_start(self, run: RunView) -> None:
        """Called before the first step of this start; in a resumed run `run.state` has the step."""

    def wishes(self, run: RunView) -> Wishes:
        """What this rank wishes to be done after the next step; called before each step. One rank's wish is enough."""
        return Wishes()

    def before_step(self, run: RunView) -> None:
        """Called when the batch of a step has been read, before its first pass."""

    def on_step(self, run: RunView) -> None:
        """Called after a step was made, or queued on the GPU: reading a tensor waits for the GPU."""

    def on_log(self, run: RunView, scalars: Mapping[str, float]) -> Mapping[str, float] | None:
        """Every `train.log_every_steps` steps, with the scalars to be logged: `train/loss`, `speed/tokens_per_second`,
        ...

        Returns:
            additional scalars by name, which are logged too, the same in every process; or None.
        """

    def on_evaluation(self, run: RunView, scalars: Mapping[str, float]) -> Mapping[str, float] | None:
        """After an evaluation, with its `validation/...`.

        Returns:
            as `on_log`; `validation/x` can be named by `evaluation.metric`.
        """

    def on_end(self, run: RunView, complete: bool) -> None:
        """Called after the last checkpoint was written; complete: whether the run is complete, not stopped early."""


class StopOnRequest(Callback):
    """Wishes to stop when a signal has come, or a deadline has passed."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def wishes(self, run: RunView) -> Wishes:
        """A stop, if it is requested in this process."""
        return Wishes(stop=self._stop.wanted)


def with_more(callbacks: Sequence[Callback], method: str, run: RunView, scalars: dict[str, float]) -> dict[str, float]:
    """The scalars, extended by those that `on_log` or `on_evaluation` of the callbacks return; each callback gets the
    scalars of the earlier ones too.

    Raises:
        UserError: a callback returned anything but numbers by name.
    """
    for callback in callbacks:
        returned = getattr(callback, method)(run, scalars)
        if returned is None:
            continue
        numbers = isinstance(returned, Mapping) and all(
            isinstance(name, str) and isinstance(value, (int, float)) for name, value in returned.items()
        )
        if not numbers:
            raise UserError(
                f"callbacks: found {str(returned)[:60]!r} returned by {type(callback).__name__}.{method}, "
                "expected None or a dictionary of floats by name"
            )
        scalars = scalars | {name: float(value) for name, value in returned.items()}
    return scalars
