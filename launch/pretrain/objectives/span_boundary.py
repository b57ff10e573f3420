"""Span boundary objective, as SpanBERT (arXiv 1907.10529): predicts masked tokens also from the two around their
span.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.objectives.masked import MaskedTokens
from cloze.launch.pretrain.objectives.objective import Term, check_option, check_standard
from cloze.model.bert import BertForPreTraining, PreTrainingOutput, encode_masked
from cloze.model.config import BertConfig
from cloze.model.embeddings import encoder_norm
from cloze.model.flops import TokenCounts
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.records import NO_LABEL


class SpanBoundaryOutput(NamedTuple):
    """Outputs of the model for a micro-batch with labels: M masked positions."""

    masked: PreTrainingOutput
    boundary_losses: Tensor
    """(M,) fp32, 0 without a label."""
    boundary_correct: Tensor
    """(M,) bool."""


def spans(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the token before and the token after the span of each masked token, and its index in the span from
    0: each (M,).

    Args:
        positions: (M,) masked positions among concatenated tokens, ascending. Spans of two samples never touch, since
            special tokens are between them.
    """
    gaps = positions.diff() != 1
    first, last = (torch.cat(ends) for ends in ((gaps.new_ones(1), gaps), (gaps, gaps.new_ones(1))))
    starts = positions.where(first, 0).cummax(0).values
    ends = positions.where(last, torch.iinfo(positions.dtype).max).flip(0).cummin(0).values.flip(0)
    return starts - 1, ends + 1, positions - starts


class SpanBoundaryBert(BertForPreTraining):
    """BERT with a head on the two vectors around a span and a position in it."""

    def __init__(self, config: BertConfig, longest: int, **options: Any) -> None:
        super().__init__(config, **options)
        width, narrow = config.hidden_size, config.embedding_width
        self.boundary_positions = nn.Embedding(longest, width)
        self.boundary_layers = nn.Sequential(
            nn.Linear(3 * width, width),
            nn.GELU(),
            encoder_norm(config),
            nn.Linear(width, narrow),
            nn.GELU(),
            encoder_norm(config, narrow),
        )

    def forward(  # type: ignore[override]  # concatenated inputs alone
        self,
        *,
        masked_positions: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        **inputs: Any,
    ) -> PreTrainingOutput | SpanBoundaryOutput:
        """Concatenated inputs as BertForPreTraining takes them; without labels what that returns."""
        if labels is None:
            return super().forward(masked_positions=masked_positions, next_sentence_label=next_sentence_label, **inputs)
        assert masked_positions is not None, "labels are of masked positions"
        before, after, places = spans(masked_positions)
        encoded, vectors = encode_masked(self.bert, torch.cat((masked_positions, before, after)), **inputs)
        hidden, left, right = vectors.tensor_split(3)
        # The last position embedding is used for all later tokens of a longer span.
        place = self.boundary_positions(places.clamp(max=self.boundary_positions.num_embeddings - 1))
        seen = self.boundary_layers(torch.cat((left, right, place.to(left.dtype)), dim=-1))
        return SpanBoundaryOutput(
            self.predictions(encoded, hidden, labels, next_sentence_label), *self.masked_lm.decoder(seen, labels)
        )


_LONGEST = 1 << 16  # no sample has more tokens


class SpanBoundary(MaskedTokens):
    """The terms of MaskedTokens and the boundary term, for data with span masks.

    Options: `longest`: distinct positions in a span. `boundary`: weight of the term; SpanBERT's is 1.
    """

    TERMS = ("mlm", "next_sentence", "boundary")

    def __init__(self, config: PretrainConfig, longest: int = 20, boundary: float = 1.0) -> None:
        super().__init__(config)
        check_option("longest", longest, 1, _LONGEST, whole=True)
        check_option("boundary", boundary, 0)
        if config.model.shifted_predictions:
            raise UserError(
                "model.shifted_predictions: found true with objective span_boundary, expected false: its spans are "
                "predicted from the tokens around them"
            )
        check_standard(config, "its head has scores of its own, which no multiplier reaches")
        self._longest, self.weights = longest, {"boundary": boundary}

    def build_model(self) -> SpanBoundaryBert:
        """BERT and the head, which exports omit."""
        return SpanBoundaryBert(self.config.model, self._longest, **self.model_options)

    def pretraining_output(self, output: SpanBoundaryOutput) -> PreTrainingOutput:
        """The PreTrainingOutput of BERT."""
        return output.masked

    def flops(self, counts: TokenCounts) -> float:
        """FLOPs of BERT, and for each masked token four squares of the hidden size and the vocabulary projection once
        more (of them one map, and the projection, in the width of the embeddings)."""
        model = self.config.model
        width, narrow = model.hidden_size, model.embedding_width
        weights = width * (3 * width + narrow) + narrow * model.vocab_size
        return super().flops(counts) + 6 * weights * counts.masked

    def divisors(self, micro_batch: MicroBatch) -> dict[str, Tensor | float]:
        """Divisors: those of MaskedTokens, and the number of masked tokens for the boundary term."""
        return super().divisors(micro_batch) | {"boundary": (micro_batch["labels"] != NO_LABEL).sum()}

    def terms(self, output: SpanBoundaryOutput, micro_batch: MicroBatch) -> dict[str, Term]:
        """The terms of MaskedTokens and the boundary term."""
        return super().terms(output.masked, micro_batch) | {
            "boundary": Term(output.boundary_losses, output.boundary_correct)
        }
