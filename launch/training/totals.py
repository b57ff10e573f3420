"""The one exchange of numbers between the ranks that a step needs, before its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from cloze.launch.system import distributed
from cloze.launch.system.devices import numbers_on


@dataclass(frozen=True)
class Wishes:
    """What a rank wishes to be done after the next step. One rank's wish is enough: all do it together."""

    stop: bool = False
    """Whether the run stops after the step, with a checkpoint."""
    save: bool = False
    """Whether a checkpoint is saved."""
    leave_out: bool = False
    """Whether a checkpoint that is due by steps is left out, since the previous one is still being written."""


@dataclass(frozen=True)
class Agreed:
    """Numbers of a rank before a step, and, summed over the ranks, what all of them know alike."""

    tokens: float
    """Real tokens of the step."""
    stop_wishes: float
    """Ranks that wish to stop."""
    save_wishes: float
    """Ranks that wish a checkpoint."""
    leave_out_wishes: float
    """Ranks that wish to leave out one that is due by steps."""
    publish_votes: float
    """Ranks that are ready to publish the checkpoint that is being written (CheckpointManager.publish_votes)."""
    seconds: float
    """Seconds of the run by rank 0's clock; 0 on the others."""


@dataclass(frozen=True)
class StepTotals:
    """Sums over the ranks, for one step."""

    divisors: torch.Tensor
    """The objective's divisors of the global batch: float64 (divisors,) on the device."""
    _agreed: distributed.NumbersOnHost

    @classmethod
    def exchange(cls, divisors: Sequence[float], own: Agreed, device: torch.device) -> StepTotals:
        """Sum this rank's numbers with those of all others. Collective.

        Args:
            divisors: the objective's `counts` of this rank's micro-batches.
        """
        sums = distributed.reduce_sum(numbers_on(device, *divisors, *astuple(own)))
        of_objective, agreed = sums.split([len(divisors), len(fields(Agreed))])
        # Copied before the step's work is queued, so that the host waits no longer than for the step before.
        return cls(of_objective, distributed.NumbersOnHost(agreed))

    def agreed(self) -> Agreed:
        """What all ranks know; waits for the copy, so call it when the step's work is queued."""
        return Agreed(*self._agreed.take())
