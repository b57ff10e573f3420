"""16-bit copies of fp32 weights, cast once per step; autocast would cast them again in each pass, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cloze.model.inputs import AutogradContext


class Copied(nn.Module):
    """A module whose own and inner weights may be replaced by 16-bit copies; `WeightCopies` says when.

    All of them must be such as autocast would cast. Those of a layer that runs several times in a pass get a gradient
    of each, added up in fp32.
    """

    _copies: _Copies | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """As nn.Module, hooks and compiled code included, which see the copies as if they were the parameters."""
        if self._copies is None:
            return super().__call__(*args, **kwargs)
        self._copies.put_in()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._copies.take_out()


class WeightCopies:
    """A context in which every `Copied` in `model` computes with copies in `dtype` of its weights as they are on entry.

    The parameters stay the leaves: their gradients are added up in fp32, the same bit for bit as under autocast. To be
    entered anew after every change of the weights, so that a copy cannot be of older ones.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.active = False
        """Whether the context is entered."""
        self._units = [module for module in model.modules() if isinstance(module, Copied)]
        self._copies = [_Copies(unit, dtype) for unit in self._units]

    def __enter__(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(
                [copy for each in self._copies for copy in each.copies],
                [parameter for each in self._copies for parameter in each.parameters],
            )
        for unit, copies in zip(self._units, self._copies, strict=True):
            unit._copies = copies
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False
        for unit in self._units:
            del unit._copies


class _Copies:
    """Those of one module, and the places where they stand instead of its parameters."""

    def __init__(self, unit: nn.Module, dtype: torch.dtype) -> None:
        places = [
            (module._parameters, name, parameter)
            for module in unit.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._places: list[tuple[dict[str, Any], str]] = [(place, name) for place, name, _ in places]
        self.parameters: list[Tensor] = [parameter for *_, parameter in places]
        self.copies = [torch.empty_like(parameter, dtype=dtype, requires_grad=False) for parameter in self.parameters]

    def put_in(self) -> None:
        copies = _FromCopies.apply(self.copies, *self.parameters)
        for (place, name), copy in zip(self._places, copies, strict=True):
            place[name] = copy

    def take_out(self) -> None:
        for (place, name), parameter in zip(self._places, self.parameters, strict=True):
            place[name] = parameter


class _FromCopies(torch.autograd.Function):
    """The cast of many parameters, of which the result is there already; backward casts all gradients at once."""

    @staticmethod
    def forward(ctx: AutogradContext, copies: Sequence[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        results = [copy.detach() for copy in copies]  # new ones each time, since each pass has a graph of its own
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*[result for result, needs in zip(results, needed, strict=True) if not needs])
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = [
            None if gradient is None else torch.empty_like(gradient, dtype=dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        torch._foreach_copy_(
            [each for each in cast if each is not None], [each for each in gradients if each is not None]
        )
        return None, *cast
