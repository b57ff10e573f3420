"""What is minimised and counted: from a model's output to a loss that is the same for any split of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cloze.pipeline.loading.batches import RankBatch
from cloze.pipeline.records import NO_LABEL


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


@dataclass(frozen=True)
class PretrainingObjective:
    """Masked-LM plus next-sentence loss, each divided by its count over the whole global batch.

    `tokens`: sum of masked-token losses / masked tokens, as in the BERT release. `samples`: mean over samples of each
    sample's mean over its masked tokens.
    """

    loss_reduction: str = "tokens"

    # What `sums` holds, in this order.
    NAMES = ("loss", "mlm_loss", "masked", "mlm_correct", "next_sentence_loss", "pairs", "next_sentence_correct")

    def counts(self, batch: RankBatch) -> list[float]:
        """This rank's denominators, to be summed over ranks before the first backward."""
        first = batch.num_masked
        if self.loss_reduction == "samples":
            first = sum(int(torch.unique(_sample_of_masked(micro)).numel()) for micro in batch.micro_batches)
        return [first, batch.num_pairs]

    def __call__(self, output, micro_batch: dict, totals: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss (scalar), and its sums, float64 (7,), in the order of NAMES.

        Args:
            output: a PreTrainingOutput.
            micro_batch: what the model was given.
            totals: (2,) float64, `counts` summed over ranks; a zero divides nothing and counts as 1.
        """
        weights = None
        if self.loss_reduction == "samples":
            sample = _sample_of_masked(micro_batch)
            # Not bincount, which waits for the device: it looks for the largest.
            per_sample = sample.new_zeros(len(micro_batch["sequence_offsets"]) - 1)
            per_sample = per_sample.scatter_add(0, sample, torch.ones_like(sample))
            weights = 1.0 / per_sample[sample]
        mlm = output.mlm_losses if weights is None else output.mlm_losses * weights
        divisors = totals.clamp(min=1).float()
        loss = mlm.sum() / divisors[0] + output.next_sentence_losses.sum() / divisors[1]
        return loss, torch.stack([
            loss.detach().double(),
            output.mlm_losses.detach().double().sum(),
            (micro_batch["labels"] != NO_LABEL).sum().double(),
            output.mlm_correct.sum().double(),
            output.next_sentence_losses.detach().double().sum(),
            (micro_batch["next_sentence_label"] != NO_LABEL).sum().double(),
            output.next_sentence_correct.sum().double(),
        ])

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Means over whatever was summed, by their names in TensorBoard; next-sentence ones only if pairs were seen."""
        s = dict(zip(self.NAMES, sums, strict=True))
        means = {
            "mlm_loss": _mean(s["mlm_loss"], s["masked"]),
            "mlm_accuracy": _mean(s["mlm_correct"], s["masked"]),
            "next_sentence_loss": _mean(s["next_sentence_loss"], s["pairs"]),
            "next_sentence_accuracy": _mean(s["next_sentence_correct"], s["pairs"]),
        }
        if means["mlm_loss"] is not None:
            means["mlm_perplexity"] = math.exp(min(means["mlm_loss"], 700.0))  # beyond it no float can hold it
        return {name: value for name, value in means.items() if value is not None}


def _sample_of_masked(micro_batch: dict) -> Tensor:
    """Index of the sample that each masked position lies in: int64 (M,)."""
    offsets = micro_batch["sequence_offsets"].long()
    return torch.searchsorted(offsets, micro_batch["masked_positions"], right=True) - 1
