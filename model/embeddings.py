"""Token ids to vectors: word, position and segment embeddings, normalisation; rotary angles."""

import torch
from torch import Tensor, nn

from cloze.model.config import SINUSOIDAL, BertConfig, ModelError
from cloze.model.dropout import dropped
from cloze.model.inputs import AutogradContext


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in fp32 inside the kernel and returned in the
    dtype of its input.

    Weights are cast to that dtype, also under autocast, so that the residual stream stays in 16 bits there
    exactly as it does with 16-bit weights.
    """

    def __init__(self, size: int, eps: float, *, kind: str = "layer_norm", bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias and kind == "layer_norm" else None
        self.kind = kind

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight.to(hidden.dtype)
        shape = weight.shape
        with torch.autocast(hidden.device.type, enabled=False):
            if self.kind == "rms_norm":
                return nn.functional.rms_norm(hidden, shape, weight, self.eps)
            bias = None if self.bias is None else self.bias.to(hidden.dtype)
            return nn.functional.layer_norm(hidden, shape, weight, bias, self.eps)


def encoder_norm(config: BertConfig, size: int | None = None) -> Norm:
    """The normalisation that embeddings and encoder use; of `size` elements, None: hidden_size."""
    size = config.hidden_size if size is None else size
    return Norm(size, config.layer_norm_eps, kind=config.normalization, bias=config.norm_bias)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which matrix products of `tensor` run: autocast's, or its own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings with norm and dropout (BERT, arXiv 1810.04805, figure 2), and a
    projection to the hidden size if that differs (last in ELECTRA, before the norm in DeBERTa).
    """

    sinusoids: Tensor

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config, width = config, config.embedding_width
        self.word = nn.Embedding(config.padded_vocab_size, width, padding_idx=config.pad_token_id)
        if config.position_embedding == "learned":
            self.position = nn.Embedding(config.num_position_rows, width)
        elif config.position_embedding in SINUSOIDAL:
            table = sinusoidal_table(config.max_position_embeddings, width)
            self.register_buffer("sinusoids", table, persistent=False)
        if config.position_embedding == "scaled_sinusoidal":  # arXiv 2202.10447
            # One dimension, since DeepSpeed does not broadcast tensors without dimensions.
            self.position_scale = nn.Parameter(torch.full((1,), width**-0.5))
        if config.type_vocab_size:
            self.segment = nn.Embedding(config.type_vocab_size, width, padding_idx=config.segment_padding_index)
        last = config.embedding_projection == "last"
        if config.embedding_norm:
            self.norm = encoder_norm(config, width if last else None)
        self.projection = nn.Linear(width, config.hidden_size, bias=last) if width != config.hidden_size else None

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        bits: Tensor | None = None,
    ) -> Tensor:
        """(T,) or (B, S) ids to (..., hidden) vectors in the encoder's compute dtype.

        Args:
            bits: (1, tokens) int32, random bits for dropout (`row_bits`); None: no dropout.
        """
        hidden = self.word(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.type_vocab_size:
            # with a single segment, ids are ignored
            if token_type_ids is None or self.config.type_vocab_size == 1:
                token_type_ids = position_ids.new_zeros(hidden.shape[:-1])
            hidden = hidden + self.segment(token_type_ids)
        if self.config.position_embedding == "learned":
            first = self.config.first_position
            hidden = hidden + self.position(position_ids + first if first else position_ids)
        elif self.config.position_embedding in SINUSOIDAL:
            places = self.sinusoids[position_ids]
            if self.config.position_embedding == "scaled_sinusoidal":
                places = places * self.position_scale
            hidden = hidden + places.to(hidden.dtype)
        last = self.config.embedding_projection == "last"
        if self.projection is not None and not last:
            hidden = self.projection(hidden)
        if self.config.embedding_norm:
            hidden = self.norm(hidden)
        hidden = hidden.to(compute_dtype(hidden))
        if bits is not None and self.config.embedding_dropout and self.config.hidden_dropout_prob:
            hidden = dropped(hidden, self.config.hidden_dropout_prob, bits)
        return self.projection(hidden) if self.projection is not None and last else hidden


def sinusoidal_table(length: int, size: int) -> Tensor:
    """(length, size) fp32 of "Attention is all you need" (arXiv 1706.03762): sine in even, cosine in odd columns."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def rotary_tables(position_ids: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (..., 1, head_size) fp32 of the rotation of each position (arXiv 2104.09864)."""
    inverse = theta ** (-torch.arange(0, head_size, 2, device=position_ids.device).float() / head_size)
    angles = position_ids[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate_packed(packed: Tensor, num_rotated: int, head_size: int, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first `num_rotated` heads, those of queries and keys, of (..., heads * head size), pairing element i
    of a head with i + half its size. The products and their sum are rounded once, to the dtype of `packed`; so are the
    gradients.

    Args:
        head_size: a number for a compiler; the tables' size would be an unknown one in all that follows.
    """
    if _BLOCK_ELEMENTS[packed.is_cuda] and not torch.compiler.is_compiling():
        result: Tensor = _RotateInBlocks.apply(packed, num_rotated, *tables)
        return result
    cosine, sine = tables
    heads = packed.unflatten(-1, (-1, head_size))
    rotated, value = heads[..., :num_rotated, :], heads[..., num_rotated:, :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = (rotated * cosine + torch.cat((-second, first), dim=-1) * sine).to(packed.dtype)
    return torch.cat((rotated, value), dim=-2).flatten(-2)


# Elements of queries and keys in one block, by whether they are on a GPU (None: all). 512 KiB in fp32 stay in a core's
# cache over the passes; with twice as many the rotation took 1.2 times as long, with a quarter 1.1 times.
_BLOCK_ELEMENTS: dict[bool, int | None] = {False: 1 << 17, True: None}


class _RotateInBlocks(torch.autograd.Function):
    """`rotate_packed` on a CPU, where passes over all tokens wait for memory. Compilers and GPUs, for which a block is
    too little work, take its expression instead; the values are the same."""

    @staticmethod
    def forward(ctx: AutogradContext, packed: Tensor, num_rotated: int, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.num_rotated = num_rotated
        rotated = torch.empty_like(packed, memory_format=torch.contiguous_format)
        half = cosine.shape[-1] // 2  # a table's halves are equal
        angles = [
            table[..., :half].expand(*packed.shape[:-1], 1, half).reshape(-1, 1, 1, half) for table in (cosine, sine)
        ]
        sources, targets = (each.unflatten(-1, (-1, 2, half)).flatten(0, -4) for each in (packed.contiguous(), rotated))
        targets[:, num_rotated:] = sources[:, num_rotated:]
        elements = _BLOCK_ELEMENTS[packed.is_cuda] or packed.numel()
        rows = max(1, elements // (2 * num_rotated * half))
        for source, target, cos, sin in zip(
            *(each.split(rows) for each in (sources[:, :num_rotated], targets[:, :num_rotated], *angles)), strict=True
        ):
            source = source.to(torch.promote_types(source.dtype, cos.dtype))
            block, products = source * cos, source * sin
            block[..., 0, :] -= products[..., 1, :]
            block[..., 1, :] += products[..., 0, :]
            target.copy_(block)
        return rotated

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _RotateInBlocks.apply(gradient, ctx.num_rotated, cosine, -sine), None, None, None


def check_length(config: BertConfig, length: int) -> None:
    """Raise ModelError if `length` tokens have no position embedding."""
    bounded = config.position_embedding in ("learned", *SINUSOIDAL)
    if bounded and length > config.max_position_embeddings:
        raise ModelError(
            f"input_ids: found a sequence of {length} tokens, expected at most "
            f"model.max_position_embeddings = {config.max_position_embeddings}"
        )
