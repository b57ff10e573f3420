"""DeepSpeed's own AdamW kernels, compiled when they are first used."""

import contextlib
import io
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from cloze.launch.engine.optimizers.groups import Group
from cloze.pipeline.errors import UserError


def deepspeed_adam(groups: list[Group], on_cpu: bool, *, bias_correction: bool, **common: Any) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam (needs g++) or FusedAdam (needs the CUDA toolkit of torch's version); both need ninja.

    Raises:
        UserError: the kernel cannot be compiled here.
    """
    kind, compiler = (DeepSpeedCPUAdam, "g++") if on_cpu else (FusedAdam, "nvcc of the CUDA version that torch has")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the compiler's commands
            optimizer: torch.optim.Optimizer = kind(groups, bias_correction=bias_correction, **common)
            return optimizer
    except Exception as error:  # a compiler fails in many ways; every one means the same to the user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"optimizer.implementation: found deepspeed, whose {kind.__name__} could not be built "
            f"({reason}), expected ninja and {compiler}; install them, or use "
            "--optimizer.implementation torch"
        ) from error
