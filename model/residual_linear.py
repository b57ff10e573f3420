"""A linear layer on a residual stream whose backward adds the residual's gradient within the matrix product."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cloze.model.inputs import AutogradContext


def branch(
    inputs: Tensor, linear: nn.Linear, widths: Sequence[int] | None = None, *, joined: bool = False
) -> tuple[Tensor, ...]:
    """(T, width) -> the inputs, for a residual, and the output of `linear` in parts (T, a width); None: in one.

    The values are those of `linear(inputs)`. In backward the residual's gradient is added by the matrix product that
    computes the gradient of `inputs`, and the gradients of the parts are not concatenated: products take them one by
    one. For GPUs, where another pass over the tokens takes a third of such a product; torch's own backward makes such
    passes. A module that is not a plain Linear, such as an adapter around one, is called normally.

    Args:
        joined: whether backward concatenates the gradients of the parts after all, and computes one large product of
            each kind instead of one for each part.
    """
    widths = [linear.out_features] if widths is None else list(widths)
    if type(linear) is not nn.Linear:
        return inputs, *linear(inputs).split(widths, -1)
    weight, bias = linear.weight.to(inputs.dtype), linear.bias
    branches: tuple[Tensor, ...] = _Branch.apply(
        inputs, weight, None if bias is None else bias.to(inputs.dtype), widths, joined
    )
    return branches


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], joined: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # the residual has no gradient if it is not used
        with torch.autocast(inputs.device.type, enabled=False):
            outputs = nn.functional.linear(inputs, weight, bias)
        ctx.save_for_backward(inputs, weight)
        ctx.widths = [sum(widths)] if joined else widths
        return inputs.view_as(inputs), *outputs.split(widths, -1)

    @staticmethod
    def backward(ctx: AutogradContext, residual: Tensor | None, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        total = to_weight = to_bias = None
        if len(ctx.widths) < len(gradients):
            gradients = (torch.cat(gradients, -1),)
        if ctx.needs_input_grad[0]:
            total = residual
            for gradient, rows in zip(gradients, weight.split(ctx.widths), strict=True):
                total = gradient @ rows if total is None else torch.addmm(total, gradient, rows)
        if ctx.needs_input_grad[1]:
            to_weight = _joined([gradient.t() @ inputs for gradient in gradients])
        if ctx.needs_input_grad[2]:
            to_bias = _joined([gradient.sum(0) for gradient in gradients])
        return total, to_weight, to_bias, None, None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
