"""Training of the head alone: a frozen encoder runs once over all examples, and its features are kept in memory."""

from collections.abc import Callable

import numpy as np
import torch

from cloze.launch.finetune.examples.base import Examples, rounds
from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device
from cloze.launch.system.environment import Environment, processes_on_this_machine
from cloze.launch.system.memory import available_bytes
from cloze.launch.training.objective import ModelOutput
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields, MicroBatch

_IDS = ("input_ids", "token_type_ids", "position_ids")  # inputs of the encoder only


class CachedExamples(Examples):
    """Examples whose batches hold features instead of ids; everything else is delegated to the original examples."""

    def __init__(self, examples: Examples, features: torch.Tensor) -> None:
        """Examples whose encoder is frozen.

        Args:
            features: (rows, ...) on the host, in the order of `examples.feature_rows`.
        """
        self._examples, self._features = examples, features
        self.name, self.labelled, self.lengths = examples.name, examples.labelled, examples.lengths
        self.num_places, self.width, self.facts = examples.num_places, examples.width, examples.facts
        self.measured, self.kind = examples.measured, examples.kind

    def batch(self, units: np.ndarray) -> MicroBatch:
        kept = {name: value for name, value in self._examples.batch(units).items() if name not in _IDS}
        return kept | {"features": self._features[torch.from_numpy(self._examples.feature_rows(units))]}

    def targets(self, units: np.ndarray) -> Fields:
        return self._examples.targets(units)

    def num_targets(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self._examples.num_targets(micro_batch)

    def losses(self, output: ModelOutput) -> torch.Tensor:
        return self._examples.losses(output)

    def outputs(self, output: ModelOutput) -> torch.Tensor:
        return self._examples.outputs(output)

    def places(self, units: np.ndarray) -> np.ndarray:
        return self._examples.places(units)

    def feature_rows(self, units: np.ndarray) -> np.ndarray:
        return self._examples.feature_rows(units)

    def metrics(self, outputs: np.ndarray) -> dict[str, float]:
        return self._examples.metrics(outputs)

    def text(self, number: int) -> str:
        return self._examples.text(number)

    def predictions(self, outputs: np.ndarray) -> list[Fields]:
        return self._examples.predictions(outputs)


@torch.no_grad()
def encode_once(
    features: Callable[..., torch.Tensor],
    examples: Examples,
    micro_batch_size: int,
    environment: Environment,
    device: torch.device,
    beat: Callable[[], None],
) -> CachedExamples:
    """The examples with their features, each computed by one of the processes. Collective.

    Every process keeps all features in host memory, since each epoch distributes them differently.

    Raises:
        UserError: on all ranks, if there is too little memory on the machine of one of them.
    """
    rank, world_size = environment.rank, environment.world_size
    kept: torch.Tensor | None = None
    num_rows = len(examples.feature_rows(np.arange(len(examples))))
    for everyone in rounds(examples.lengths, micro_batch_size, world_size):
        mine = everyone[rank::world_size]
        # A rank without units repeats one, at least to get the shape.
        outputs = features(**to_device(examples.batch(mine if len(mine) else np.zeros(1, np.int64)), device))
        rows = examples.feature_rows(everyone)
        order = np.argsort(rows)
        if kept is None:
            _check_memory(num_rows, outputs, processes_on_this_machine(environment), device)
            kept = torch.empty(num_rows, *outputs.shape[1:], dtype=outputs.dtype)
        shared = torch.zeros(len(rows), *outputs.shape[1:], dtype=outputs.dtype, device=device)
        if len(mine):
            places = order[np.searchsorted(rows[order], examples.feature_rows(mine))]
            shared[torch.from_numpy(places).to(device)] = outputs
        kept[torch.from_numpy(rows)] = distributed.reduce_sum(shared).cpu()
        beat()
    assert kept is not None, "a file has examples"
    return CachedExamples(examples, kept)


def _check_memory(num_rows: int, outputs: torch.Tensor, processes: int, device: torch.device) -> None:
    """Raise UserError unless the memory of each machine can hold `num_rows` rows like `outputs` for each of its
    processes. Collective.
    """
    needed = num_rows * outputs[0].numel() * outputs.element_size()
    free = available_bytes()
    short = free is not None and needed * processes > free
    if distributed.reduce_sum(torch.tensor(float(short), device=device)):
        raise UserError(
            f"freeze encoder: found {num_rows:,} vectors of the encoder to keep, {needed / 1e9:,.1f} GB a process, "
            "expected them to fit into the memory of each machine"
            + (f" ({free / 1e9:,.1f} GB are free here)" if short and free is not None else "")
            + "; start fewer processes, shorten --max_length, or freeze below_N, which keeps nothing"
        )
