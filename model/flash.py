"""Flash attention over concatenated sequences: torch's operator, with dropout from a key."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from cloze.model.inputs import AutogradContext

# Of this module by whatever name it is imported: exported models bring copies of it (launch/tools/exported_code.py).
_OPERATORS = __name__.replace(".", "_")


@contextlib.contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's default generator of the device begins at `seed`; afterwards it stands where it stood.

    For kernels that draw from no other. Nothing here waits for the device.
    """
    if device.type == "cuda":  # two numbers say where it stands, its whole state being a tensor to be copied
        generator = torch.cuda.default_generators[device.index]
        before, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.manual_seed(before)
            generator.set_offset(offset)
    else:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    reach: tuple[int, int],
    probability: float,
    seed: int | None,
) -> Tensor:
    """(T, heads, head size) each -> the same, by flash attention. CUDA (Ampere and newer), fp16 or bf16.

    `probability` of a dropped attention probability, by a mask that `seed` alone decides; None drops nothing. Not
    varlen_attn (torch.nn.attention): it has no dropout, and takes 140 us of Python.

    Args:
        offsets: (B + 1,) int32.
        longest: tokens of the longest sequence.
        reach: tokens that a token sees before and after itself, -1 for all.
    """
    if seed is None or probability == 0:
        return _forward(query, key, value, offsets, longest, reach, 0.0)[0]
    if torch.compiler.is_compiling():
        result: Tensor = _dropping(query, key, value, offsets, longest, *reach, probability, seed)[0]
        return result
    with drawing_from(seed, query.device):
        return _forward(query, key, value, offsets, longest, reach, probability)[0]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    reach: tuple[int, int],
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, log of the softmax's sums, and where the mask was drawn from; autograd knows it (derivatives.yaml)."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        probability,
        reach == (-1, 0),
        False,
        window_size_left=reach[0],
        window_size_right=reach[1],
    )[:3]
    return result


@torch.library.custom_op(f"{_OPERATORS}::flash_attention", mutates_args=())
def _dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    left: int,
    right: int,
    probability: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as one operator, into which compilers do not look: in a graph no generator can be set."""
    with drawing_from(seed, query.device):
        return _forward(query, key, value, offsets, longest, (left, right), probability)


@_dropping.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), sums, query.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op(f"{_OPERATORS}::flash_attention_backward", mutates_args=())
def _dropping_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    offsets: Tensor,
    state: Tensor,
    longest: int,
    left: int,
    right: int,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        output,
        sums,
        offsets,
        offsets,
        longest,
        longest,
        probability,
        (left, right) == (-1, 0),
        state,
        state.new_empty(0),
        window_size_left=left,
        window_size_right=right,
    )
    return result


@_dropping_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: AutogradContext, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, offsets, *ctx.numbers, _ = inputs
    ctx.save_for_backward(query, key, value, *output[:2], offsets, output[2])


def _backward(ctx: AutogradContext, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_dropping_backward(gradient, *ctx.saved_tensors, *ctx.numbers), *(None,) * 6


_dropping.register_autograd(_backward, setup_context=_keep)
