"""Parameter groups by module type, and the optimizer over them."""

from __future__ import annotations

import torch
from torch import nn

from launch.config import OptimizerConfig

# Modules whose weights are tables, looked up and not multiplied.
EMBEDDINGS = (nn.Embedding,)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict]:
    """Two groups, `decay` and `no_decay`; every trainable parameter is in exactly one.

    Matrices decay. Biases, norms (whatever has fewer than two dimensions) and, by choice, embeddings do not. A tied
    matrix belongs to the first module that owns it, so that a decoder tied to the embedding follows the embedding.
    """
    decay: dict[str, nn.Parameter] = {}
    rest: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            # ZeRO-3 leaves a partitioned parameter without a shape and keeps the true one in ds_shape.
            dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            is_embedding = isinstance(module, EMBEDDINGS)
            decays = dimensions >= 2 and (config.decay_embeddings or not is_embedding)
            (decay if decays else rest)[name] = parameter
    return [
        {"name": "decay", "params": list(decay.values()), "weight_decay": config.weight_decay},
        {"name": "no_decay", "params": list(rest.values()), "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig, learning_rate: float) -> torch.optim.Optimizer:
    """torch's fused AdamW over the model's parameter groups: one kernel a group, on CPU and CUDA."""
    return torch.optim.AdamW(parameter_groups(model, config), lr=learning_rate, betas=tuple(config.betas),
                             eps=config.eps, fused=True)
