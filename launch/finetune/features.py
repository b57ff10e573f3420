"""Training of the head alone: a frozen encoder runs once over all examples, and its features are kept in memory."""

import copy
from collections.abc import Callable

import numpy as np
import torch

from cloze.launch.finetune.examples.base import Examples, longest_first, rounds
from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device
from cloze.launch.system.environment.launchers import Environment, processes_on_this_machine
from cloze.launch.system.memory import available_bytes
from cloze.pipeline.errors import UserError


@torch.no_grad()
def encode_once(
    features: Callable[..., torch.Tensor],
    examples: Examples,
    micro_batch_size: int,
    environment: Environment,
    device: torch.device,
    beat: Callable[[], None],
) -> Examples:
    """The examples with their features, each computed by one of the processes. Collective.

    Every process keeps all features in host memory, since each epoch distributes them differently.

    Raises:
        UserError: on all ranks, if there is too little memory on the machine of one of them.
    """
    rank, world_size = environment.rank, environment.world_size
    kept: torch.Tensor | None = None
    num_rows = len(examples.feature_rows(np.arange(len(examples))))
    for everyone in rounds(longest_first(examples.lengths), micro_batch_size, world_size):
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
    cached = copy.copy(examples)
    cached.features = kept
    return cached


def _check_memory(num_rows: int, outputs: torch.Tensor, processes: int, device: torch.device) -> None:
    """Raise UserError unless the memory of each machine can hold `num_rows` rows like `outputs` for each of its
    processes. Collective.
    """
    needed = num_rows * outputs[0].numel() * outputs.element_size()
    free = available_bytes()
    short = free is not None and needed * processes > free
    if distributed.on_any_rank(short, device):
        raise UserError(
            f"freeze encoder: found {num_rows:,} vectors of the encoder to keep, {needed / 1e9:,.1f} GB a process, "
            "expected them to fit into the memory of each machine"
            + (f" ({free / 1e9:,.1f} GB are free here)" if short and free is not None else "")
            + "; start fewer processes, shorten --max_length, or freeze below_N, which keeps nothing"
        )
