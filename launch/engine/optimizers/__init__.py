"""Parameter groups, and the optimizers by the values of `optimizer.name`."""

import torch
from torch import nn

from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.optimizers.adam_family import Lamb, StableAdamW, UncorrectedAdamW
from cloze.launch.engine.optimizers.deepspeed_adam import compiled_adam
from cloze.launch.engine.optimizers.groups import Group, matrix_rows, parameter_groups
from cloze.launch.engine.optimizers.muon import MuonWithAdamW
from cloze.launch.engine.optimizers.uncompiled import without_compiler

__all__ = ["build_optimizer", "matrix_rows", "parameter_groups"]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    learning_rate: float,
    *,
    states_on_cpu: bool = False,
    groups: list[Group] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over the model's parameter groups, or over others.

    Each group carries its `weight_decay`, and as `lr_scale` the share of the learning rate that it gets
    (`Engine.step`).

    Args:
        states_on_cpu: whether ZeRO keeps the states in host memory, so that the step must run there.
        groups: None: all of the model's.

    Raises:
        UserError: DeepSpeed's kernel was chosen and cannot be built.
    """
    without_compiler()
    groups = parameter_groups(model, config) if groups is None else groups
    common: Group = {"lr": learning_rate, "betas": tuple(config.betas), "eps": config.eps}
    if config.implementation == "deepspeed":
        on_cpu = states_on_cpu or next(model.parameters()).device.type == "cpu"
        return compiled_adam(groups, on_cpu, bias_correction=config.bias_correction, **common)
    if config.name == "lamb":
        low, high = config.trust_ratio_bounds or (0.0, float("inf"))
        return Lamb(
            groups,
            **common,
            bias_correction=config.bias_correction,
            min_ratio=low,
            max_ratio=high,
            adapt_undecayed=config.adapt_undecayed,
        )
    if config.name == "stable_adamw":
        return StableAdamW(groups, **common)
    if config.name == "muon":
        rows = matrix_rows(model, config.matrices)
        return MuonWithAdamW(groups, **common, momentum=config.momentum, rows=rows, decay=config.matrix_decay)
    if not config.bias_correction:
        return UncorrectedAdamW(groups, **common)
    return torch.optim.AdamW(groups, **common, fused=True)  # one kernel a group, on CPU and CUDA
