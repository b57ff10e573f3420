"""The loss of fine-tuning: the sum of each head's losses over the number of targets in the global batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cloze.launch.finetune.examples.base import Examples
from cloze.launch.training.objective import ModelOutput
from cloze.pipeline.fields import MicroBatch


class FinetuningObjective:
    """Sum over the head's parts (label columns; start and end of a span) of each part's mean loss over its targets.

    The mean is over the global batch, so that the gradient is the same for any split into ranks and micro-batches.
    """

    # Names of the sums of a call, in their order.
    NAMES = ("loss",)
    STEP_SEED = False  # the model samples nothing

    def __init__(self, examples: Examples) -> None:
        """The losses of the kind of these examples.

        Args:
            examples: the training examples, which define their losses.
        """
        self._examples = examples

    def counts(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """Number of targets of each part on this rank, to be summed over the ranks before the first backward."""
        return torch.stack([self._examples.num_targets(micro) for micro in micro_batches]).sum(0).tolist()

    def __call__(self, output: ModelOutput, micro_batch: MicroBatch, totals: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss (scalar), and its sums, float64 (1,).

        Args:
            output: output of the model.
            totals: (parts,) float64, `counts` summed over the ranks; 0 counts as 1.
        """
        loss = (self._examples.losses(output) / totals.clamp(min=1).float()).sum()
        return loss, loss.detach().double().reshape(1)

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """No curves besides the loss."""
        return {}
