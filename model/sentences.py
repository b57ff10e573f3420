"""One vector a text: the encoder, and what its tokens' vectors become."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cloze.model.bert import BertPreTrained
from cloze.model.config import BertConfig, ModelError
from cloze.model.heads import pool

POOLINGS = ("cls", "mean", "max")


class SentenceOutput(NamedTuple):
    """Vectors of texts, as the pooling makes them: not normalised."""

    vectors: Tensor
    """(B, hidden) fp32."""
    texts: Tensor | None = None
    """(B,) int64: which text each is, as the inputs said."""


class SentenceEncoder(BertPreTrained):
    """The encoder alone, and how a text's vector is made of its tokens': it has no parameters of its own.

    `pooling`: cls, mean or max, over all tokens, special ones included. Raises ModelError for another one.
    """

    uses_pooler = False

    def __init__(self, config: BertConfig, pooling: str = "mean", **options: Any) -> None:
        super().__init__(config, **options)
        if pooling not in POOLINGS:
            raise ModelError(f"pooling: found {pooling!r}, expected one of {', '.join(POOLINGS)}")
        self.pooling = pooling

    def forward(
        self, input_ids: Tensor | None = None, *, texts: Tensor | None = None, **inputs: Any
    ) -> SentenceOutput:
        """Inputs as BertModel.forward takes them. `texts`: (B,) int64, equal for equal texts; it comes back in the
        output, for losses that compare vectors of a whole batch.
        """
        offsets = inputs.get("sequence_offsets")
        if self.pooling == "cls":
            if offsets is not None:  # no token but the first: the last layer is spared all others
                inputs["read_tokens"] = offsets.new_empty(0, dtype=torch.int64)
            vectors = self.bert(input_ids, **inputs).first_hidden_state
        else:
            hidden = self.bert(input_ids, **inputs).last_hidden_state
            vectors = pool(hidden, self.pooling, offsets, inputs.get("attention_mask"))
        return SentenceOutput(vectors.float(), texts)
