"""A convolution beside the first layer (DeBERTa-v2-xlarge, arXiv 2006.03654, section 4.2: n-grams of the input)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cloze.model.attention import Layout, seen_tokens
from cloze.model.config import BertConfig, ModelError
from cloze.model.dropout import dropped
from cloze.model.embeddings import encoder_norm


class Neighbours(NamedTuple):
    """Which tokens stand beside each other in a batch."""

    layout: Layout
    """That of the batch if it is padded, (B, S, ...); of concatenated tokens one row, (1, L, ...), with zeros between
    the sequences.
    """
    seen: Tensor | None = None
    """(B, S, 1) bool, in a padded batch: false is padding; None: there is none."""


def neighbours(layout: Layout, attention_mask: Tensor | None, size: int) -> Neighbours:
    """What a convolution over `size` tokens sees of a batch.

    Raises:
        ModelError: each token attends to tokens of its own, as a convolution can't.
    """
    if layout.causal or (attention_mask is not None and attention_mask.dim() == 3):
        found = "causal attention" if layout.causal else "attention_mask (B, S, S)"
        raise ModelError(
            f"{found}: found with model.convolution_size {size}, which sees tokens on both sides; leave it out"
        )
    if layout.offsets is not None:
        return _in_one_row(layout, layout.offsets, layout.num_tokens, size)
    batch_size, length = layout.batch_size, layout.length
    seen = seen_tokens("attention_mask", attention_mask, batch_size, length, length)
    return Neighbours(layout, None if seen is None else seen.view(batch_size, length, 1))


def _in_one_row(layout: Layout, offsets: Tensor, num_tokens: int, size: int) -> Neighbours:
    """Concatenated tokens with so many zeros between the sequences that the convolution sees those of one sequence
    alone. The host does not wait for the device.
    """
    tokens = torch.arange(num_tokens, device=offsets.device)
    gap = size // 2
    places = tokens + gap * torch.searchsorted(offsets[1:-1].long(), tokens, right=True)
    length = num_tokens + gap * (offsets.numel() - 2)
    index = torch.full((length,), num_tokens, device=offsets.device).scatter_(0, places, tokens)
    return Neighbours(layout._replace(batch_size=1, length=length, padded_index=places, token_index=index, groups=()))


class Convolution(nn.Module):
    """norm(x + act(conv(e))) of a layer's output x and its input e, as ConvLayer in transformers."""

    def __init__(self, config: BertConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        size = config.convolution_size
        self.map = nn.Conv1d(config.hidden_size, config.hidden_size, size, padding=size // 2)
        self.norm = encoder_norm(config)
        self.activation, self.probability = activation, config.hidden_dropout_prob

    def forward(
        self, hidden: Tensor, given: Tensor, neighbours: Neighbours, bits: Tensor | None, read: Tensor | None
    ) -> Tensor:
        """(..., hidden) -> (..., hidden).

        Args:
            hidden: the layer's output, of the tokens `read` if these are given.
            given: its input, of all tokens.
            bits: (1, tokens of `hidden`) int32, random bits for dropout; None: no dropout.
        """
        layout, seen = neighbours
        row = layout.pad(given if seen is None else given * seen)
        change = layout.unpad(self.map(row.transpose(1, 2)).transpose(1, 2))
        change = change if read is None else change.index_select(0, read)
        if bits is not None and self.probability:
            change = dropped(change, self.probability, bits)
        result: Tensor = self.norm(hidden + self.activation(change))
        return result
