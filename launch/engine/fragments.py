"""Where DeepSpeed keeps the optimizer, and the fp32 master weights that this process updates."""

from collections.abc import Iterator
from dataclasses import dataclass

import deepspeed
import torch
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """A part of a parameter's fp32 master that this process updates; a view, nothing is copied."""

    name: str
    """The parameter's."""
    start: int
    """The first element of the flat parameter that is in it."""
    values: Tensor
    """The parameter itself at stage 0, a flat part of it above; at stage 3 the last part may end in padding."""


def base_optimizer(engine: deepspeed.DeepSpeedEngine) -> torch.optim.Optimizer:
    """The optimizer inside DeepSpeed's partitioning one, or the only one."""
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer


def master_fragments(engine: deepspeed.DeepSpeedEngine) -> Iterator[Fragment]:
    """The fragments of this process, in the order of the model's parameters.

    DeepSpeed keeps them in the parameter itself at stage 0, in `_hp_mapping` at stages 1 and 2, in `grad_position` at
    3; at these three there is none of a parameter that is not trained.
    """
    stage, partitioned = engine.zero_optimization_stage(), engine.optimizer
    for name, parameter in engine.module.named_parameters():
        if stage == 0:
            yield Fragment(name, 0, parameter.detach())
        elif stage < 3:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:  # otherwise other processes hold the whole parameter
                yield Fragment(name, mapping.lp_fragment_address.start, mapping.hp_fragment.detach())
        elif (place := partitioned.grad_position.get(partitioned.get_param_id(parameter))) is not None:
            group, start, length = place
            rank = deepspeed.comm.get_rank(group=parameter.ds_process_group)
            flat = partitioned.fp32_partitioned_groups_flat[group].detach()
            yield Fragment(name, rank * length, flat.narrow(0, start, length))


class UpdatedParts:
    """Finds the fragments in what the optimizer updates: flat groups of DeepSpeed's, or the parameters themselves."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._optimizer = base_optimizer(engine)
        self._places: dict[int, list[tuple[str, int, int]]] = {}  # by the storage that contains them
        for fragment in master_fragments(engine):
            place = fragment.values.untyped_storage().data_ptr()
            start = int(fragment.values.storage_offset())
            self._places.setdefault(place, []).append((fragment.name, start, fragment.values.numel()))

    def __iter__(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, weight and gradient, both flat, of every fragment that has a gradient, inside the optimizer's step."""
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                weight, gradient = tensor.detach().flatten(), tensor.grad.flatten()
                # A process's part of a small group may be only padding.
                for name, start, length in self._places.get(tensor.untyped_storage().data_ptr(), ()):
                    start -= tensor.storage_offset()
                    yield name, weight[start : start + length], gradient[start : start + length]
