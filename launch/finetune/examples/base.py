"""The interface of examples: units that are distributed over ranks, batches, targets, metrics of outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cloze.launch.finetune.examples.prediction_errors import PredictionErrors
from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device
from cloze.launch.texts.encoding import spelled_specials
from cloze.launch.texts.sequences import Sequences
from cloze.launch.training.objective import ModelOutput
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.loading import order
from cloze.pipeline.loading.batches import RankBatch
from cloze.pipeline.records import NO_LABEL
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_OF_ENCODER = ("input_ids", "token_type_ids", "position_ids")  # inputs of the encoder only


def remarks(rows: Collection[Collection[str]], tokenizer: Tokenizer) -> str:
    """How many rows have texts that may not be what was meant, in parentheses for the table at the start; empty if none
    has.
    """
    special = spelled_specials(tokenizer)
    counts = {
        "with an empty text": sum(not all(map(str.strip, row)) for row in rows),
        "that spell a special token": sum(any(map(special.search, row)) for row in rows),
    }
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f" ({said})" if said else ""


class Examples(ABC):
    """The examples of one file, encoded.

    A unit is what a batch counts: a sequence, or the sequences of all choices. The model's output for a unit has one or
    more rows; each row has its place in an array (num_places, width).
    """

    name: str
    """The file's name without its endings."""
    labelled: bool
    """Whether the file says what is to be predicted."""
    lengths: np.ndarray
    """Tokens of each unit: (units,)."""
    width: int
    by_token: bool = False
    """Whether the model's output has a row for each token; else for each unit."""
    segments: tuple[int, int] = (0, 1)
    """The model's types of segments A and B."""
    _sequences: Sequences
    """The sequences of all units."""
    errors: type[PredictionErrors]
    """How its predictions are wrong."""
    facts: str
    """A line about them for the table at the start."""
    measured: str
    """The metrics, each with what it is averaged over where its name does not say, in one line."""
    features: torch.Tensor | None = None
    """Outputs of a frozen encoder for all units, if it ran once for all (`features.py`): (rows, ...) on the host, by
    `feature_rows`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """Number of examples of the file, as counted in results."""
        return len(self)

    @property
    def longest(self) -> int:
        """Length in tokens of the longest sequence."""
        return int(self._sequences.lengths.max())

    @property
    def num_places(self) -> int:
        """Number of rows of the model's output for all units."""
        return len(self._sequences.input_ids) if self.by_token else len(self)

    def sequences(self, units: np.ndarray) -> np.ndarray:
        """Indices of the sequences of some units; by default one for each unit."""
        return units

    def batch(self, units: np.ndarray) -> MicroBatch:
        """Inputs of forward for some units, without targets."""
        return self._sequences.batch(self.sequences(units), self.segments)

    def inputs(self, units: np.ndarray) -> MicroBatch:
        """As `batch`, with features, if they are kept, instead of what only the encoder reads."""
        batch = self.batch(units)
        if self.features is None:
            return batch
        kept = {name: value for name, value in batch.items() if name not in _OF_ENCODER}
        return kept | {"features": self.features[torch.from_numpy(self.feature_rows(units))]}

    @abstractmethod
    def targets(self, units: np.ndarray) -> Fields:
        """Targets that forward takes in addition to return losses; only if `labelled`."""

    def num_targets(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Number of targets of each part of the loss that is averaged separately: (parts,). One part per column of
        labels.
        """
        return (micro_batch["labels"] != NO_LABEL).sum(0).reshape(-1)

    def losses(self, output: ModelOutput) -> torch.Tensor:
        """Sum of the losses of each part in the model's output: (parts,)."""
        return output.losses.sum(0).reshape(-1)

    def outputs(self, output: ModelOutput) -> torch.Tensor:
        """Rows of the model's output: (rows, width); by default its logits."""
        return output.logits

    def places(self, units: np.ndarray) -> np.ndarray:
        """Places of the output rows of some units: (rows,) int64."""
        return self._sequences.tokens(self.sequences(units)) if self.by_token else units

    def feature_rows(self, units: np.ndarray) -> np.ndarray:
        """Indices of the feature vectors that the head reads for some units (one per sequence or per token):
        (rows,).
        """
        return self.places(units) if self.by_token else self.sequences(units)

    @abstractmethod
    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        """Every metric by its usual name from the outputs (num_places, width) of all units; only if `labelled`."""

    def majority(self) -> dict[str, float]:
        """Metrics of the baseline that always predicts the most frequent answer; empty if there is no such baseline."""
        return {}

    @abstractmethod
    def text(self, number: int) -> str:
        """Readable text of an example by its number in `predictions`."""

    @abstractmethod
    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        """The prediction of each example, with its probability."""


@dataclass(frozen=True)
class ExampleStream:
    """Endless batches of units from `position` on, epoch after epoch; the same for any number of ranks.

    The order of an epoch depends only on (number of units, seed, epoch), as in pretraining.
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
            orders = {
                epoch: orders[epoch] if epoch in orders else order.row_order(len(self.examples), self.seed, epoch, 0)
                for epoch in range(first, int(epochs[-1]) + 1)
            }
            units = np.array([orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)])
            yield self._batch(position, first, units)
            position += size

    def _batch(self, position: int, epoch: int, units: np.ndarray) -> RankBatch:
        lengths = self.examples.lengths[units]
        rows = deal(lengths, self.micro_batch_size, self.rank, self.world_size)
        mine = np.concatenate(rows)
        return RankBatch(
            micro_batches=[
                self.examples.inputs(units[chosen]) | self.examples.targets(units[chosen]) for chosen in rows
            ],
            position=position,
            epoch=epoch,
            num_samples=len(units),
            num_tokens=int(lengths[mine].sum()),
            num_masked=0,
            num_pairs=0,
            indices=units[mine],
            num_padding=sum(int(lengths[r].max()) * len(r) - int(lengths[r].sum()) for r in rows),
        )


@torch.no_grad()
def predict(
    forward: Callable[..., Any],
    examples: Examples,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Outputs of all units, fp32 (num_places, width), on every rank; each unit is computed once. Collective."""
    outputs = torch.zeros(examples.num_places, examples.width, device=device)
    for everyone in rounds(longest_first(examples.lengths), micro_batch_size, world_size):
        mine = everyone[rank::world_size]
        # A forward is collective if parameters are partitioned: a rank without units repeats one and ignores the
        # result.
        units = mine if len(mine) else np.zeros(1, np.int64)
        rows = examples.outputs(forward(**to_device(examples.inputs(units), device))).float()
        if len(mine):
            outputs[torch.from_numpy(examples.places(mine)).to(device)] = rows
        beat()
    return distributed.reduce_sum(outputs).cpu().numpy()


def rounds(order: np.ndarray, micro_batch_size: int, world_size: int) -> Iterator[np.ndarray]:
    """The units of each round in the given order: one micro-batch per rank, of which rank r takes every
    `world_size`-th unit from r on.
    """
    step = micro_batch_size * world_size
    return (order[start : start + step] for start in range(0, len(order), step))


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Units in an order by which a lack of memory shows at once."""
    return np.argsort(-lengths, kind="stable")


def deal(lengths: np.ndarray, micro_batch_size: int, rank: int, world_size: int) -> list[np.ndarray]:
    """Distribute a global batch: its rows (micro_batch_size,) for each micro-step of this rank.

    Rows are sorted by length, so that in each micro-step all ranks have similar lengths: little padding, no stragglers.
    """
    by_length = np.argsort(lengths, kind="stable")
    return [everyone[rank::world_size] for everyone in rounds(by_length, micro_batch_size, world_size)]
