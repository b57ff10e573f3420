"""Attention: one interface, a table of kernels.

Tokens are either concatenated, (T, hidden), with the offsets of their sequences, or padded, (B, S, hidden), with a
mask. Only the kernels depend on the layout: they get it as a `Layout`; everything else works on single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cloze.model.config import BertConfig, ModelError
from cloze.model.dropout import dropout
from cloze.model.flash import drawing_from, flash_attention
from cloze.model.inputs import AutogradContext


class Layout(NamedTuple):
    """Positions of the sequences of a batch, and which tokens attend to which. B sequences, S the longest of them."""

    batch_size: int
    length: int
    """S."""
    offsets: Tensor | None
    """(B + 1,) int32 cumulative lengths of concatenated tokens; None: the tokens are padded, (B, S, ...)."""
    padded_index: Tensor | None
    """(T,) int64 place of each concatenated token among B * S; None: no sequence is shorter than S."""
    token_index: Tensor | None
    """(B * S,) int64 token at each of these places, T where there is none; None with padded_index."""
    bias: Tensor | None
    """Added to the scores: (B or 1, heads or 1, S or 1, S); None: every token sees every token."""
    local_bias: Tensor | None
    """The same in layers with local attention."""
    causal: bool
    window: int
    """Width in tokens of what layers with local attention see; 0: there are none."""
    groups: tuple[Layout, ...] = ()
    """Concatenated tokens on CPU: the same sequences in runs of like length, which the eager kernel takes in turn."""
    num_tokens: int = 0
    """T, of concatenated tokens."""

    def pad(self, tokens: Tensor) -> Tensor:
        """(T, ...) or (B, S, ...) -> (B, S, ...); the padding is zero."""
        if self.offsets is None:
            return tokens
        if self.padded_index is not None:
            tokens = _Pad.apply(tokens, self.token_index, self.padded_index)
        return tokens.view(self.batch_size, self.length, *tokens.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`."""
        if self.offsets is None:
            return padded
        padded = padded.flatten(0, 1)
        if self.padded_index is None:
            return padded
        tokens: Tensor = _Unpad.apply(padded, self.token_index, self.padded_index)
        return tokens

    def with_bias(self, bias: Tensor) -> Layout:
        """The same with (1, heads, S, S) added to the scores of all layers, where S counts from a sequence's start."""
        of_length = bias[..., : self.length, : self.length]
        return self._replace(
            bias=of_length if self.bias is None else self.bias + of_length,
            local_bias=None if self.local_bias is None else self.local_bias + of_length,
            groups=tuple(group.with_bias(bias) for group in self.groups),
        )


def _rows_or_zero(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], zero where the index is one past the last row. Selecting is several times faster than placing."""
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))).index_select(0, index)


class _Pad(torch.autograd.Function):
    """(T, ...) -> (B * S, ...) and the gradient back; the transpose of `_Unpad`."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, token_index: Tensor, padded_index: Tensor) -> Tensor:
        ctx.save_for_backward(padded_index)
        return _rows_or_zero(rows, token_index)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """(B * S, ...) -> (T, ...) and the gradient back; the transpose of `_Pad`."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, token_index: Tensor, padded_index: Tensor) -> Tensor:
        ctx.save_for_backward(token_index)
        return rows.index_select(0, padded_index)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _rows_or_zero(gradient, ctx.saved_tensors[0]), None, None


def sequences_and_positions(num_tokens: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each concatenated token, and its position from the start of it: int64 (T,)."""
    starts = offsets[:-1].long()
    tokens = torch.arange(num_tokens, device=offsets.device)
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    return sequence, tokens - starts[sequence]


def concatenated_layout(
    config: BertConfig,
    kernel: str,
    offsets: Tensor,
    length: int,
    num_tokens: int,
    dtype: torch.dtype,
    causal: bool,
    grouped: bool = False,
) -> Layout:
    """Layout of concatenated tokens. All sizes are host integers, so the host does not wait for the device.

    Args:
        grouped: the eager kernel may process sequences in groups on a CPU; there are then no probabilities (B, heads,
            S, S).
    """
    batch_size = offsets.numel() - 1
    if kernel == "eager" and grouped and not offsets.is_cuda:
        groups = _groups(config, offsets, dtype, causal)
        if len(groups) > 1:
            shape = batch_size, length, offsets, None, None, None, None
            return Layout(*shape, causal, config.local_attention_window, groups, num_tokens)
    padded_index = token_index = seen = None
    if kernel != "varlen" and num_tokens != batch_size * length:
        sequence, positions = sequences_and_positions(num_tokens, offsets)
        padded_index = positions + sequence * length
        places = torch.arange(length, device=offsets.device)
        seen = places < offsets.diff()[:, None, None, None]
        token_index = torch.where(seen[:, 0, 0], offsets[:-1, None] + places, num_tokens).flatten()
    indices = padded_index, token_index
    layout = _layout(config, kernel, batch_size, length, offsets, indices, seen, offsets.device, dtype, causal)
    return layout._replace(num_tokens=num_tokens)


# Scores of one group: 4 MiB in 16 bits, which stay in the cache between the products and the softmax.
_GROUP_SCORES = 1 << 21
# Cost of one more group in each layer, as an equivalent number of padded scores: some forty small operations, and
# oneDNN compiles six more products. Measured: a fine-tuning step on short sentences took 1.37 times as long with seven
# groups as with one.
_GROUP_COST = 1 << 18


def _groups(config: BertConfig, offsets: Tensor, dtype: torch.dtype, causal: bool) -> tuple[Layout, ...]:
    """Layouts of groups of neighbouring sequences of similar length: at most an eighth of a group is padding, or less
    than the cost of one more group.
    """
    ends = offsets.tolist()
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    groups, first = [], 0
    while first < len(lengths):
        last, total, needed, longest = first, 0, 0, 0
        while last < len(lengths):
            length = lengths[last]
            size, wider = last + 1 - first, max(longest, length)
            scores = config.num_attention_heads * size * wider**2
            padded = size * wider - total - length > size * wider // 8
            wasted = scores - config.num_attention_heads * (needed + length**2)
            if size > 1 and (scores > _GROUP_SCORES or (padded and wasted > _GROUP_COST)):
                break
            last, total, needed, longest = last + 1, total + length, needed + length**2, wider
        part = offsets[first : last + 1] - ends[first]
        groups.append(concatenated_layout(config, "eager", part, longest, total, dtype, causal))
        first = last
    return tuple(groups)


def padded_layout(
    config: BertConfig, kernel: str, attention_mask: Tensor | None, hidden: Tensor, causal: bool
) -> Layout:
    """Layout of padded tokens `hidden` (B, S, hidden) with a mask of attended tokens.

    Args:
        attention_mask: (B,) lengths, (B, S), or (B, S, S) (row: query; column: key); true or 1 is attended to.
    """
    batch_size, length = hidden.shape[:2]
    seen = seen_tokens("attention_mask", attention_mask, batch_size, length, length)
    indices = None, None
    return _layout(config, kernel, batch_size, length, None, indices, seen, hidden.device, hidden.dtype, causal)


def seen_tokens(name: str, mask: Tensor | None, batch_size: int, queries: int, keys: int) -> Tensor | None:
    """Boolean mask (B, 1, 1 or queries, keys) from lengths (B,), a mask (B, keys), or (B, queries, keys).

    Raises:
        ModelError: with the mask's name, for another shape.
    """
    if mask is None:
        return None
    if tuple(mask.shape) not in ((batch_size,), (batch_size, keys), (batch_size, queries, keys)):
        raise ModelError(
            f"{name}: found shape {tuple(mask.shape)}, expected ({batch_size},) lengths, ({batch_size}, {keys}) or "
            f"({batch_size}, {queries}, {keys})"
        )
    if mask.dim() == 1:
        mask = torch.arange(keys, device=mask.device) < mask[:, None]
    return (mask[:, None, None] if mask.dim() == 2 else mask[:, None]).bool()


def mask_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias for the scores from `seen` (bool): 0 where true, the lowest number where false."""
    return torch.zeros((), device=seen.device, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _layout(
    config: BertConfig,
    kernel: str,
    batch_size: int,
    length: int,
    offsets: Tensor | None,
    indices: tuple[Tensor | None, Tensor | None],
    seen: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    causal: bool,
) -> Layout:
    """Combine padding, causality, windows and ALiBi into one bias for global and one for local layers."""
    window = config.local_attention_window
    bias = local_bias = None
    if kernel != "varlen":  # the varlen kernel takes offsets, causality and window instead
        bias = torch.zeros((), device=device, dtype=dtype) if seen is None else mask_bias(seen, dtype)
        lowest = torch.finfo(dtype).min
        places = torch.arange(length, device=device)
        distance = places[None, :] - places[:, None]
        if config.position_embedding == "alibi":
            slopes = alibi_slopes(config.num_attention_heads, device)
            bias = bias + (-distance.abs() * slopes[:, None, None])[None].to(dtype)
        if causal:
            bias = bias.masked_fill(distance > 0, lowest)
        if window:
            local_bias = _four_dimensional(bias.masked_fill(distance.abs() > window // 2, lowest))
        bias = _four_dimensional(bias) if bias.dim() else None
    return Layout(batch_size, length, offsets, *indices, bias, local_bias, causal, window)


def _four_dimensional(bias: Tensor) -> Tensor:
    return bias[(None,) * (4 - bias.dim())]


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """(heads,) fp32 slopes of ALiBi (arXiv 2108.12409): 2^(-8/n), its square, ... for n heads, a power of two.

    For other numbers: the slopes of the next lower power n, then every second slope of 2n.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = torch.arange(1, power + 1, device=device) * (-8 / power)
    between = (2 * torch.arange(num_heads - power, device=device) + 1) * (-4 / power)
    return torch.exp2(torch.cat((exponents, between)))


# The kernels. Query, key, value and the result are (B, S, heads, head size), for varlen (T, heads, head size). Keys and
# values may have fewer heads, each for as many neighbouring heads of queries. `dropout_seed` None: no dropout;
# `scale` of the products, None: 1/sqrt(head size).


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    bias: Tensor | None,
    probability: float,
    dropout_seed: int | None,
    head_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Batched matrix product, softmax, batched matrix product.

    The fastest on a CPU, and the only one that returns probabilities or takes a `head_mask` (heads,).

    Returns:
        The result and (B, heads, S, S') probabilities.
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    (batch, heads, length, size), groups, keys = query.shape, key.shape[1], key.shape[2]
    # Heads of queries that share keys are rows of one product.
    query = query.reshape(batch * groups, heads // groups * length, size)
    key, value = (each.reshape(batch * groups, keys, size) for each in (key, value))
    # beta = 0 ignores the first argument; alpha scales inside the product instead of in a pass of its own.
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=scale or size**-0.5)
    if bias is not None:  # in place and not on a view, or autograd copies the scores again in backward
        # flatten, not a reshape to -1: with dynamic shapes torch 2.13's inductor then reads other sequences' bias.
        if groups == heads or bias.shape[1:3] == (1, 1):
            bias = bias.expand(batch, groups, -1, -1)
        else:
            bias = bias.expand(batch, heads, -1, -1).unflatten(1, (groups, -1)).flatten(2, 3)
        scores.add_(bias.flatten(0, 1))
    probabilities = scores.softmax(-1).view(batch, heads, length, keys)
    weights = dropout(probabilities, probability, dropout_seed)
    if head_mask is not None:
        weights = weights * head_mask.to(weights.dtype)[:, None, None]
    result = torch.bmm(weights.view(batch * groups, -1, keys), value).view(batch, heads, length, size)
    return result.transpose(1, 2), weights


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    bias: Tensor | None,
    probability: float,
    dropout_seed: int | None,
    scale: float | None = None,
) -> tuple[Tensor, None]:
    """torch's scaled dot product attention on padded sequences."""
    shared = query.shape[2] // key.shape[2]
    if shared > 1:  # of torch's kernels that take a bias, some have no grouped queries
        key, value = (each.repeat_interleave(shared, 2) for each in (key, value))
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if dropout_seed is None or probability == 0:
        result = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:
        result = _seeded_sdpa(query, key, value, bias, probability, dropout_seed, scale)
    return result.transpose(1, 2), None


def _seeded_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    probability: float,
    seed: int,
    scale: float | None,
) -> Tensor:
    with drawing_from(seed, query.device):
        return nn.functional.scaled_dot_product_attention(query, key, value, bias, dropout_p=probability, scale=scale)


@cache
def leave_graphs() -> None:
    """Exclude seeded SDPA and the eager kernel's dropout from compiled graphs, which cannot set a generator's state and
    would compile the seed in. Call it right before layers are compiled, since it imports the compiler.
    """
    global _seeded_sdpa, dropout
    _seeded_sdpa, dropout = map(torch.compiler.disable, (_seeded_sdpa, dropout))


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    bias: None,
    probability: float,
    dropout_seed: int | None,
    local: bool = False,
) -> tuple[Tensor, None]:
    """Flash attention over concatenated sequences, without any padding. CUDA, fp16 or bf16."""
    assert layout.offsets is not None, "select_kernel takes this kernel for concatenated tokens only"
    reach = layout.window // 2 if local else -1
    result = flash_attention(
        query,
        key,
        value,
        layout.offsets,
        layout.length,
        (reach, 0 if layout.causal else reach),
        probability,
        dropout_seed,
    )
    return result, None


Kernel = Callable[..., tuple[Tensor, Tensor | None]]
KERNELS: dict[str, Kernel] = {"eager": eager_attention, "sdpa": sdpa_attention, "varlen": varlen_attention}


def check_kernel(name: str, config: BertConfig) -> None:
    """Raise ModelError for a kernel that does not support the configuration; called at construction."""
    if name not in ("auto", *KERNELS):
        raise ModelError(f"attention_kernel: found {name!r}, expected auto, {', '.join(KERNELS)}")
    if name != "varlen":
        return
    if not _flash_has_heads_of(config.head_size):
        raise ModelError(
            f"attention_kernel: varlen needs heads of a multiple of 8 up to 256, found {config.head_size}; use sdpa"
        )
    if config.biases_scores:
        found = "relative_position_buckets" if config.relative_position_buckets else "position_embedding"
        found = "relative_attention" if config.relative_terms else found
        raise ModelError(f"attention_kernel: varlen takes no bias, found {found} = {getattr(config, found)}; use sdpa")
    if config.add_cross_attention:
        raise ModelError(
            "attention_kernel: varlen takes concatenated tokens, cross-attention padded ones, found "
            "model.add_cross_attention = true; use sdpa"
        )


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether the device supports flash attention: Ampere and newer (flash_api.cpp, is_sm80_or_newer)."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def select_kernel(name: str, config: BertConfig, hidden: Tensor, needs_probabilities: bool) -> str:
    """The kernel for this forward; `hidden` is (T, hidden) or (B, S, hidden) in the dtype of the kernels' inputs.

    Only the eager kernel supports attention probabilities and head masks; it is then used whatever the configuration.
    """
    if needs_probabilities:
        return "eager"
    flash = (
        hidden.is_cuda
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.dim() == 2
        and _has_flash(hidden.device)
    )
    if name == "varlen" and not flash:
        raise ModelError(
            f"attention_kernel: varlen needs concatenated bf16 or fp16 tokens on CUDA (Ampere or newer), found "
            f"{hidden.dtype} on {hidden.device.type}, {'padded' if hidden.dim() == 3 else 'concatenated'}; "
            "use auto"
        )
    if name != "auto":
        return name
    if not hidden.is_cuda:
        return "eager"
    return "varlen" if flash and not config.biases_scores and _flash_has_heads_of(config.head_size) else "sdpa"


def _flash_has_heads_of(size: int) -> bool:
    return size % 8 == 0 and size <= 256
