"""The interface between the trainer and an objective."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from cloze.pipeline.fields import MicroBatch

ModelOutput: TypeAlias = Any
"""What a model's forward returns, which only its objective knows."""


class TrainingObjective(Protocol):
    """A loss over the global batch, the same for any split of it into ranks and micro-batches."""

    @property
    def NAMES(self) -> tuple[str, ...]:
        """Names of the sums of a call, in their order; the first is the loss."""

    @property
    def STEP_SEED(self) -> bool:
        """Whether the model's forward takes a `step_seed` in training, the same for all micro-batches of a step."""

    def counts(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """This rank's divisors, to be summed over the ranks before the first backward."""

    def __call__(
        self, output: ModelOutput, micro_batch: MicroBatch, totals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch's share of the loss, (), and its sums, float64 (len(NAMES),).

        Args:
            output: output of the model for the micro-batch.
            totals: (divisors,) float64, `counts` summed over the ranks.
        """

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Curves besides the loss by name, from the sums of several steps over all ranks."""


class WholeBatchObjective(ABC):
    """A further base class of an objective whose loss needs the outputs of the whole batch, such as a contrastive loss.
    The batch is computed twice then, unless a process has a single micro-batch.
    """

    @abstractmethod
    def observe(self, outputs: Sequence[ModelOutput], totals: torch.Tensor) -> None:
        """Take the outputs of all micro-batches of this rank, before the first backward. Collective.

        Args:
            outputs: outputs in the order of the micro-batches.
            totals: as in `__call__`.
        """


class MeasuredObjective(TrainingObjective, Protocol):
    """An objective that is also evaluated on validation data."""

    @property
    def TERMS(self) -> tuple[str, ...]:
        """Names of the terms of the loss."""

    def total(self, means: Mapping[str, float]) -> float:
        """The loss, computed from the means of its terms by name."""


class SourceSums(Protocol):
    """Statistics per source of a mixture (implemented in launch/pretrain/source_statistics.py)."""

    @property
    def num_sums(self) -> int:
        """Length of `sums`."""

    def sums(self, output: ModelOutput, micro_batch: MicroBatch, sources: torch.Tensor) -> torch.Tensor:
        """Sums over a micro-batch, float64 (num_sums,).

        Args:
            output: output of the model for the micro-batch.
            sources: (B,) source of each sample.
        """

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Curves by name, from the sums of several steps over all ranks."""

    def progress(self, position: int) -> dict[str, float]:
        """How far each source has been read at a position of the stream, by name."""
