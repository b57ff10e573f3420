"""The default objective: masked language modelling and next sentence prediction, as BERT (Devlin et al. 2019)."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.objectives.objective import Objective, Term
from cloze.launch.training.objective import ModelOutput
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.records import NO_LABEL


class MaskedTokens(Objective):
    """Masked-LM plus next-sentence loss, each divided by its count over the whole global batch.

    `train.loss_reduction` tokens: sum of masked-token losses / masked tokens, as in the BERT release. samples: mean
    over samples of each sample's mean over its masked tokens.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("mlm", "next_sentence")

    def divisors(self, micro_batch: MicroBatch) -> dict[str, Tensor | float]:
        """Divisors: masked tokens, or samples with masked tokens; and pairs."""
        masked = micro_batch["labels"] != NO_LABEL
        if self._by_samples:
            masked = _masked_per_sample(micro_batch) > 0
        # Directly in the dtype of the sums: each cast would be one more kernel.
        pairs = (micro_batch["next_sentence_label"] != NO_LABEL).sum(dtype=torch.float64)
        return {"mlm": masked.sum(dtype=torch.float64), "next_sentence": pairs}

    def terms(self, output: ModelOutput, micro_batch: MicroBatch) -> dict[str, Term]:
        """Terms of a PreTrainingOutput."""
        weights = count = None
        if self._by_samples:
            weights = 1.0 / _masked_per_sample(micro_batch)[_sample_of_masked(micro_batch)]
            count = (micro_batch["labels"] != NO_LABEL).sum(dtype=torch.float64)
        return {
            "mlm": Term(output.mlm_losses, output.mlm_correct, weights, count),
            "next_sentence": Term(output.next_sentence_losses, output.next_sentence_correct),
        }

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Losses and accuracies, and the perplexity; next-sentence ones only if pairs were seen."""
        means = super().scalars(sums)
        if "mlm_loss" in means:
            means["mlm_perplexity"] = math.exp(min(means["mlm_loss"], 700.0))  # a larger exponent overflows a float
        return means

    @property
    def _by_samples(self) -> bool:
        return self.config.train.loss_reduction == "samples"


class MaskedAndNextTokens(MaskedTokens):
    """MaskedTokens with micro-batches of next tokens among those of masked ones: all of them at first
    (`masking.next_tokens_until`), or a share in every step (`train.causal_share`), by which its mean is then weighted,
    or that share at first.

    Both have the same loss, over labels at given positions; next tokens have curves of their own.
    """

    TERMS = ("mlm", "next_sentence", "next_token")

    def __init__(self, config: PretrainConfig) -> None:
        super().__init__(config)
        if share := config.train.causal_share:
            self.weights = {"mlm": 1 - share, "next_token": share}

    def step_weights(self, totals: Tensor) -> Mapping[str, float | Tensor]:
        """The share's in a step with both kinds; 1 where masked tokens are alone."""
        both = totals[self.TERMS.index("next_token")] > 0
        return {name: torch.where(both, weight, 1.0) for name, weight in self.weights.items()}

    def total(self, means: Mapping[str, float]) -> float:
        """As of MaskedTokens, without the weights: evaluations have masked tokens alone."""
        return sum(means.get(f"{name}_loss", 0.0) for name in self.TERMS)

    def divisors(self, micro_batch: MicroBatch) -> dict[str, Tensor | float]:
        """Divisors: those of MaskedTokens, the first under the name of what is predicted."""
        divisors = super().divisors(micro_batch)
        predicted = divisors.pop("mlm")
        return divisors | dict(zip(_present_and_absent(micro_batch), (predicted, 0.0), strict=True))

    def terms(self, output: ModelOutput, micro_batch: MicroBatch) -> dict[str, Term]:
        """Terms of a PreTrainingOutput."""
        terms = super().terms(output, micro_batch)
        predicted = terms.pop("mlm")
        present, absent = _present_and_absent(micro_batch)
        nothing = predicted.losses.new_zeros(())
        return terms | {present: predicted, absent: Term(nothing, nothing.bool())}


def _present_and_absent(micro_batch: MicroBatch) -> tuple[str, str]:
    """The term that a micro-batch has a loss for, and the one that it has none for."""
    return ("next_token", "mlm") if micro_batch.get("causal") else ("mlm", "next_token")


def is_real(labels: Tensor) -> Tensor:
    """bool (): whether a micro-batch is real, not a filler batch of an evaluation, in which all labels are ignored."""
    return (labels != NO_LABEL).any() | (labels.numel() == 0)


def _masked_per_sample(micro_batch: MicroBatch) -> Tensor:
    """Number of masked tokens of each sample: int64 (B,)."""
    sample = _sample_of_masked(micro_batch)
    # Not bincount, which waits for the device to find the maximum.
    counts = sample.new_zeros(len(micro_batch["sequence_offsets"]) - 1)
    return counts.scatter_add(0, sample, torch.ones_like(sample))


def _sample_of_masked(micro_batch: MicroBatch) -> Tensor:
    """Index of the sample of each masked position: int64 (M,)."""
    offsets = micro_batch["sequence_offsets"].long()
    return torch.searchsorted(offsets, micro_batch["masked_positions"], right=True) - 1
