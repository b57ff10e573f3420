"""The interface of examples: units that are distributed over ranks, batches, targets, metrics of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cloze.launch.finetune.examples.predicted import Prediction
from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device
from cloze.pipeline.loading import order
from cloze.pipeline.loading.batches import RankBatch, deal
from cloze.pipeline.records import NO_LABEL


class Examples(ABC):
    """The examples of one file, encoded.

    A unit is what a batch counts: a sequence, or the sequences of all choices. A model gives each unit some rows of
    outputs, which have their places in one array of `num_places` rows of `width` numbers.
    """

    name: str
    """The file's name without its endings."""
    labelled: bool
    """Whether the file says what is to be predicted."""
    lengths: np.ndarray
    """Tokens of each unit: (units,)."""
    num_places: int
    width: int
    segments: tuple[int, int] = (0, 1)
    """The model's types of segments A and B."""
    kind: type[Prediction]
    """What its predictions are."""
    facts: str
    """What is worth saying about them, in one line."""
    measured: str
    """The metrics, each with what it is averaged over where its name does not say, in one line."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """Those of the file, as its results count them."""
        return len(self)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @abstractmethod
    def batch(self, units: np.ndarray) -> dict:
        """What forward takes of some units, without anything to predict."""

    @abstractmethod
    def targets(self, units: np.ndarray) -> dict:
        """What forward takes beside, so that it gives losses; only if `labelled`."""

    def num_targets(self, micro_batch: dict) -> torch.Tensor:
        """Targets that have a loss, of each part of a loss that is averaged by itself: (parts,). One part for each
        column of labels."""
        return (micro_batch["labels"] != NO_LABEL).sum(0).reshape(-1)

    def losses(self, output: Any) -> torch.Tensor:
        """Sum of the losses of each part in what the model has returned: (parts,)."""
        return output.losses.sum(0).reshape(-1)

    @abstractmethod
    def outputs(self, output: Any) -> torch.Tensor:
        """Rows of outputs of a forward: (rows, width)."""

    @abstractmethod
    def places(self, units: np.ndarray) -> np.ndarray:
        """Where the rows of outputs of some units belong: (rows,) int64."""

    def feature_rows(self, units: np.ndarray) -> np.ndarray:
        """Numbers of the vectors that a head reads of some units: of their sequences, or of their tokens: (rows,)."""
        return self.places(units)

    @abstractmethod
    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        """Every metric by its usual name, from the outputs (num_places, width) of all units; only if `labelled`."""

    def majority(self) -> dict[str, float]:
        """Metrics of always answering what is most frequent here; none where that says nothing."""
        return {}

    @abstractmethod
    def text(self, number: int) -> str:
        """What a person reads of the example of a number, as `predictions` counts them."""

    @abstractmethod
    def predictions(self, outputs: np.ndarray) -> list[dict]:
        """What is predicted for each example, with its probability."""


@dataclass(frozen=True)
class ExampleStream:
    """Endless batches of units from `position` on, epoch after epoch; the same for any number of ranks.

    The order of an epoch is a function of (number of units, seed, epoch) alone, as in pretraining.
    """

    examples: Examples
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    seed: int
    position: int

    def __iter__(self) -> Iterator[RankBatch]:
        position, size = self.position, self.global_batch_size
        orders: dict[int, np.ndarray] = {}
        while True:
            epochs, places = np.divmod(np.arange(position, position + size), len(self.examples))
            first = int(epochs[0])
            orders = {epoch: orders[epoch] if epoch in orders else self._order(epoch)
                      for epoch in range(first, int(epochs[-1]) + 1)}
            units = np.array([orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)])
            yield self._batch(position, first, units)
            position += size

    def _order(self, epoch: int) -> np.ndarray:
        return order.row_order(len(self.examples), self.seed, epoch, 0)

    def _batch(self, position: int, epoch: int, units: np.ndarray) -> RankBatch:
        lengths = self.examples.lengths[units]
        rows = deal(lengths, self.micro_batch_size, self.rank, self.world_size)
        mine = np.concatenate(rows)
        return RankBatch(
            micro_batches=[self.examples.batch(units[chosen]) | self.examples.targets(units[chosen])
                           for chosen in rows],
            position=position, epoch=epoch, num_samples=len(units), num_tokens=int(lengths[mine].sum()), num_masked=0,
            num_pairs=0, indices=units[mine],
            num_padding=sum(int(lengths[r].max()) * len(r) - int(lengths[r].sum()) for r in rows),
        )


@torch.no_grad()
def predict(forward: Callable, examples: Examples, micro_batch_size: int, rank: int, world_size: int,
            device: torch.device, beat: Callable[[], None] = lambda: None) -> np.ndarray:
    """Outputs of all units, float32 (num_places, width), on every rank; each unit is computed once. Collective."""
    outputs = torch.zeros(examples.num_places, examples.width, device=device)
    for everyone in rounds(examples.lengths, micro_batch_size, world_size):
        mine = everyone[rank::world_size]
        # A forward is collective where parameters are partitioned: a rank with no unit left repeats one for nothing.
        units = mine if len(mine) else np.zeros(1, np.int64)
        rows = examples.outputs(forward(**to_device(examples.batch(units), device))).float()
        if len(mine):
            outputs[torch.from_numpy(examples.places(mine)).to(device)] = rows
        beat()
    return distributed.reduce_sum(outputs).cpu().numpy()


def rounds(lengths: np.ndarray, micro_batch_size: int, world_size: int) -> Iterator[np.ndarray]:
    """The units of each round, a micro-batch for every rank, of which each takes every `world_size`-th from its own
    on; the longest first, so that memory runs out at once if at all."""
    by_length = np.argsort(-lengths, kind="stable")
    step = micro_batch_size * world_size
    return (by_length[start : start + step] for start in range(0, len(lengths), step))
