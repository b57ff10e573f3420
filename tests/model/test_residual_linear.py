"""A linear map and what goes on beside it: the numbers of torch's own, by products alone."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cloze.model.residual_linear import branch


class Names(TorchDispatchMode):
    """The operations on whole matrices, by name."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.seen = elements, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements:
            self.seen.append(function.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("takes_residual", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_outputs_and_gradients_are_those_of_the_map(bias, takes_residual, joined):
    torch.manual_seed(0)
    linear, inputs = nn.Linear(4, 6, bias=bias).double(), torch.randn(5, 4, dtype=torch.double, requires_grad=True)
    widths = (3, 1, 2)
    factors = [torch.randn(5, width, dtype=torch.double) for width in widths]

    def gradients(residual, parts):
        loss = sum((factor * part).sum() for factor, part in zip(factors, parts, strict=True))
        loss = loss + residual.square().sum() if takes_residual else loss
        return loss, *torch.autograd.grad(loss, [inputs, *linear.parameters()])

    residual, *parts = branch(inputs, linear, widths, joined=joined)
    wanted = gradients(inputs, linear(inputs).split(widths, -1))
    for ours, expected in zip(gradients(residual, parts), wanted, strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradients_that_nobody_wants_are_not_computed():
    linear, inputs = nn.Linear(4, 6), torch.randn(5, 4)
    linear.weight.requires_grad_(False)
    _, part = branch(inputs, linear)
    part.sum().backward()
    assert linear.weight.grad is inputs.grad is None and linear.bias.grad.tolist() == [5.0] * 6


def test_backward_neither_adds_nor_brings_together_what_has_the_size_of_all_tokens():
    linear, inputs = nn.Linear(8, 24), torch.randn(1000, 8, requires_grad=True)
    residual, *parts = branch(inputs, linear, [8, 8, 8])
    outputs, given = [residual, *parts], [torch.randn(1000, 8) for _ in range(4)]
    with Names(1000 * 8) as names:
        torch.autograd.grad(outputs, [inputs], given)
    assert [name for name in names.seen if name not in ("detach", "view", "t")] == ["addmm"] * 3
