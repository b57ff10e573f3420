"""What fine-tuning minimises: each head's loss over its targets in the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cloze.model.tasks import SpanOutput
from cloze.pipeline.records import NO_LABEL


class FinetuningObjective:
    """Sum over the head's parts (label columns; start and end of a span) of each part's mean loss over its targets.

    The mean is over the global batch, so that the gradient is the same for any split into ranks and micro-batches.
    """

    # What `sums` holds, in this order.
    NAMES = ("loss",)
    STEP_SEED = False  # nothing is drawn
    whole_batch = False

    def counts(self, micro_batches: Sequence[dict]) -> list[float]:
        """Targets of each part on this rank, to be summed over ranks before the first backward."""
        return torch.stack([_num_targets(micro) for micro in micro_batches]).sum(0).tolist()

    def __call__(self, output: Any, micro_batch: dict, totals: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss (scalar), and its sums, float64 (1,).

        Args:
            output: a TaskOutput or a SpanOutput.
            totals: (parts,) float64, `counts` summed over ranks; a zero divides nothing and counts as 1.
        """
        if isinstance(output, SpanOutput):
            assert output.start_losses is not None and output.end_losses is not None, "training has positions"
            losses = torch.stack([output.start_losses.sum(), output.end_losses.sum()]) / 2
        else:
            losses = output.losses.sum(0).reshape(-1)
        loss = (losses / totals.clamp(min=1).float()).sum()
        return loss, loss.detach().double().reshape(1)

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Nothing beside the loss."""
        return {}


def _num_targets(micro_batch: dict) -> Tensor:
    """Targets of each part of a micro-batch: (parts,)."""
    if "num_softmaxes" in micro_batch:
        return torch.full((2,), micro_batch["num_softmaxes"])
    if "start_positions" in micro_batch:
        return torch.stack([(micro_batch[name] >= 0).sum() for name in ("start_positions", "end_positions")])
    labels = micro_batch["labels"]
    if labels.is_floating_point():  # numbers, or independent labels: one loss an example
        return torch.tensor([len(labels)])
    return (labels != NO_LABEL).sum(0).reshape(-1)
