"""torch's optimizers without the compiler, which they import at their first use."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, Optimizer


def without_compiler() -> None:
    """Take the wrappers for torch.compile off torch's optimizers (torch/optim/optimizer.py, _disable_dynamo and
    _use_grad_for_differentiable), unless the compiler is imported already.

    At their first call these import torch._dynamo, which takes as long as torch itself and brings a quarter of the
    modules of a start. No optimizer is compiled here.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(Optimizer, name, inspect.unwrap(getattr(Optimizer, name)))
    update = inspect.unwrap(Adam.step)

    def step(self: Adam, closure: Callable[[], float] | None = None) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return update(self, closure)

    Adam.step = step  # type: ignore[method-assign]  # AdamW's, too
