"""Reads from and writes to a running engine: optimizer, master weights, precision, whether a step was skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import deepspeed
import torch
from torch import nn

from cloze.launch.engine.config import PRECISIONS
from cloze.model.copies import WeightCopies


class Engine(Protocol):
    """What the rooms above use of DeepSpeed's engine, which says nothing of its types."""

    module: Any
    """The model: a nn.Module with an encoder `bert`, in fine-tuning or pretraining."""
    optimizer: Any
    device: torch.device
    checkpoint_engine: Any

    def __call__(self, **inputs: Any) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> Any: ...
    def step(self) -> None: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def get_global_grad_norm(self) -> Any: ...
    def gradient_clipping(self) -> float: ...
    def fp16_enabled(self) -> bool: ...
    def torch_autocast_enabled(self) -> bool: ...
    def torch_autocast_dtype(self) -> torch.dtype: ...
    def zero_optimization(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...
    def save_checkpoint(self, folder: str, **options: Any) -> Any: ...
    def load_checkpoint(self, folder: str, **options: Any) -> Any: ...
    def destroy(self) -> None: ...


def step_skipped(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """Whether the last step was skipped for an infinite or NaN gradient, alike on all ranks: float64 (1,), 0 or 1."""
    if engine.zero_optimization():
        # full, and not tensor, which would be made on the host and wait for the device to take it
        return torch.full((1,), float(engine.optimizer.overflow), dtype=torch.float64, device=engine.device)
    return engine.found_inf.double().reshape(1)


def weight_copies(engine: deepspeed.DeepSpeedEngine) -> AbstractContextManager[None]:
    """Around all passes of one step: on a GPU, at stage 0 and under autocast, weights are cast once for all of them.

    A CPU casts each weight where it is used, in its caches: a step with copies took 1.00 to 1.03 times as long there.
    """
    if engine.zero_optimization() or not engine.torch_autocast_enabled() or engine.device.type == "cpu":
        return nullcontext()
    if not hasattr(engine, "weight_copies"):
        engine.weight_copies = WeightCopies(engine.module, engine.torch_autocast_dtype())
    return engine.weight_copies


def base_optimizer(engine: deepspeed.DeepSpeedEngine) -> torch.optim.Optimizer:
    """The optimizer inside DeepSpeed's partitioning one, or the only one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def master_fragments(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name of each parameter with the flat part of its fp32 master that this process updates, and where in it that
    begins; views, nothing is copied. At stage 3 the last part may end in padding.

    Where DeepSpeed keeps them: the parameter itself at stage 0, `_hp_mapping` at stages 1 and 2, `grad_position` at 3;
    at these three there is none of a parameter that does not learn.
    """
    for name, parameter in engine.module.named_parameters():
        if not engine.zero_optimization():
            yield name, 0, parameter.detach()
        elif engine.zero_optimization_stage() < 3:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:  # else other processes have all of it
                yield name, mapping.lp_fragment_address.start, mapping.hp_fragment.detach()
        elif (place := engine.optimizer.grad_position.get(engine.optimizer.get_param_id(parameter))) is not None:
            group, start, length = place
            rank = deepspeed.comm.get_rank(group=parameter.ds_process_group)
            yield (
                name,
                rank * length,
                engine.optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, start, length),
            )


def full_parameter(engine: deepspeed.DeepSpeedEngine, parameter: nn.Parameter) -> torch.Tensor:
    """A copy of a parameter in fp32 on the host, gathered from all processes where it is partitioned. Collective."""
    with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
        return parameter.detach().float().cpu().clone()


@torch.no_grad()
def set_parameter(engine: deepspeed.DeepSpeedEngine, parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter values, all of them, flat, on every process; its master stays as it is. Collective at stage
    3.
    """
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=engine.zero_optimization_stage() == 3):
        parameter.copy_(values.view(parameter.shape))


def set_learning_rate(engine: deepspeed.DeepSpeedEngine, rate: float) -> None:
    """Set the rate that the next optimizer step uses, in every group its share."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def compute_dtype(engine: deepspeed.DeepSpeedEngine) -> torch.dtype:
    """What matrix products run in: read off the live engine, not off the configuration."""
    if engine.torch_autocast_enabled():
        return engine.torch_autocast_dtype()
    return next(engine.module.parameters()).dtype


def live_precision(engine: deepspeed.DeepSpeedEngine) -> str:
    """Formats of matrix products, of parameters and of their copies that the optimizer updates, read off the live
    engine."""
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    stored, updated = (
        "+".join(sorted({names[tensor.dtype] for tensor in tensors}))
        for tensors in (engine.module.parameters(), (fragment for *_, fragment in master_fragments(engine)))
    )
    text = f"{names[compute_dtype(engine)]} products, {stored} parameters"
    return text if stored == updated else f"{text} with {updated} master copies"
