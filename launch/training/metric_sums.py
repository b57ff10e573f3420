"""Sums of losses, tokens and padding since the last line of metrics."""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from cloze.launch.system import distributed
from cloze.launch.system.devices import numbers_on


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


class MetricWindow:
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
