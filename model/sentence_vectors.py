"""Sentence vectors: the encoder, and pooling over its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import Tensor

from cloze.model.bert import BertPreTrained, first_tokens, reading_no_others
from cloze.model.config import BertConfig, ModelError, VectorPooling
from cloze.model.inputs import Inputs, ModelOptions

if TYPE_CHECKING:  # Python 3.10 lacks it
    from typing import Unpack

POOLINGS = get_args(VectorPooling)


class SentenceOutput(NamedTuple):
    """Pooled vectors of texts, not normalised."""

    vectors: Tensor
    """(B, hidden) fp32."""
    texts: Tensor | None = None
    """(B,) int64: which text each is, as the inputs said."""


class SentenceEncoder(BertPreTrained):
    """The encoder with pooling of the tokens' vectors; it has no parameters of its own.

    Args:
        pooling: cls, mean or max, over all tokens, special tokens included.

    Raises:
        ModelError: for another value.
    """

    uses_pooler = False

    def __init__(self, config: BertConfig, pooling: str = "mean", **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        if pooling not in POOLINGS:
            raise ModelError(f"pooling: found {pooling!r}, expected one of {', '.join(POOLINGS)}")
        self.pooling = pooling

    def forward(
        self, input_ids: Tensor | None = None, *, texts: Tensor | None = None, **inputs: Unpack[Inputs]
    ) -> SentenceOutput:
        """Takes the inputs of BertModel.forward.

        Args:
            texts: (B,) int64, equal for equal texts; returned in the output, for losses that compare the vectors of a
                whole batch.
        """
        offsets = inputs.get("sequence_offsets")
        if self.pooling == "cls":
            if offsets is not None:
                inputs["read_tokens"] = reading_no_others(offsets)
            vectors = self.bert(input_ids, **inputs).first_hidden_state
        else:
            hidden = self.bert(input_ids, **inputs).last_hidden_state
            vectors = pool(hidden, self.pooling, offsets, inputs.get("attention_mask"))
        return SentenceOutput(vectors.float(), texts)


def pool(hidden: Tensor, kind: str, offsets: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
    """One vector per sequence, (B, hidden): that of the first token (cls), the mean or the maximum of all tokens.

    Args:
        hidden: (T, hidden) with `offsets`, or (B, S, hidden) with a mask of lengths (B,) or (B, S), None for no
            padding.
    """
    if kind not in POOLINGS:
        raise ModelError(f"pooling: found {kind!r}, expected cls, mean or max (the pooler is part of the model)")
    if kind == "cls":
        return first_tokens(hidden, offsets)
    if offsets is not None:
        # The kernel has no 16-bit form on every device.
        return torch.segment_reduce(hidden.float(), kind, offsets=offsets.long()).to(hidden.dtype)
    if attention_mask is None:
        return hidden.mean(1) if kind == "mean" else hidden.amax(1)
    if attention_mask.dim() == 1:
        attention_mask = torch.arange(hidden.shape[1], device=hidden.device) < attention_mask[:, None]
    if attention_mask.dim() != 2:
        raise ModelError("attention_mask: pooling needs lengths (B,) or a mask (B, S)")
    seen = attention_mask.bool()[..., None]
    if kind == "max":
        return hidden.masked_fill(~seen, -torch.inf).amax(1)
    return (hidden * seen).sum(1) / seen.sum(1)
