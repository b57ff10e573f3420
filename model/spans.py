"""Extractive question answering: scores of starts and ends, in one softmax a sequence or over several."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.classifiers import WithTransform, with_states
from model.config import BertConfig
from model.heads import NO_LABEL, class_losses, exponentials_by_group


class SpanOutput(NamedTuple):
    """Scores and losses of extractive question answering."""

    start_logits: Tensor
    """(T,) or (B, S)."""
    end_logits: Tensor
    start_losses: Tensor | None = None
    """(B,) fp32, 0 where the answer lies outside the sequence; None without positions."""
    end_losses: Tensor | None = None
    num_starts: Tensor | None = None
    num_ends: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def loss(self) -> Tensor | None:
        """Mean of the start's and the end's mean loss, as in Hugging Face; None without positions."""
        if self.start_losses is None:
            return None
        return (self.start_losses.sum() / self.num_starts + self.end_losses.sum() / self.num_ends) / 2


class BertForQuestionAnswering(WithTransform):
    """The span of the text that answers a question: a score for each token to be its start, and its end."""

    uses_pooler = False

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.span = nn.Linear(config.hidden_size, 2)

    def features(self, input_ids: Tensor | None = None, **inputs) -> Tensor:
        """What the head reads of the encoder: (T, hidden) or (B, S, hidden)."""
        return self.encode(input_ids, inputs)[0].last_hidden_state

    def forward(
        self, input_ids: Tensor | None = None, *, start_positions: Tensor | None = None,
        end_positions: Tensor | None = None, softmax: Tensor | None = None, start_targets: Tensor | None = None,
        end_targets: Tensor | None = None, num_softmaxes: int = 0, **inputs,
    ) -> SpanOutput:
        """Positions: (B,) int64 from the start of each sequence; outside of it (or negative) there is no
        loss.

        Instead of them, for tokens of several sequences that compete in one softmax: `softmax` (T,) int64, the number
        of each token's, below `num_softmaxes`, or -1; targets (T,) bool. Losses are then (num_softmaxes,).

        Over padded inputs the softmax runs over the padding too, as the reference's does.
        """
        encoded, seed = self.encode(input_ids, inputs)
        hidden = inputs["features"] if encoded is None else encoded.last_hidden_state
        if self.config.classifier_transform:  # BERT has neither transform nor dropout here
            hidden = self.transformed(hidden, seed)
        start, end = self.span(hidden).unbind(-1)
        output = with_states(SpanOutput(start, end), encoded)
        if softmax is not None:
            count = torch.tensor(num_softmaxes, device=start.device)
            return output._replace(
                start_losses=shared_softmax_losses(start.float(), softmax, start_targets, num_softmaxes),
                end_losses=shared_softmax_losses(end.float(), softmax, end_targets, num_softmaxes),
                num_starts=count, num_ends=count,
            )
        if start_positions is None or end_positions is None:
            return output
        offsets = inputs.get("sequence_offsets")
        losses = [_span_losses(*pair, offsets) for pair in ((start, start_positions), (end, end_positions))]
        return output._replace(
            start_losses=losses[0][0], end_losses=losses[1][0], num_starts=losses[0][1], num_ends=losses[1][1]
        )


def _span_losses(scores: Tensor, positions: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses (B,) and their number, of (B, S) scores, or of (T,) with the offsets of their sequences."""
    if offsets is None:
        labels = positions.masked_fill((positions < 0) | (positions >= scores.shape[1]), NO_LABEL)
        return class_losses(scores, labels)[0], (labels != NO_LABEL).sum()
    scores, offsets = scores.float(), offsets.long()
    lengths = offsets.diff()
    sequence = torch.arange(len(lengths), device=lengths.device)
    sequence = sequence.repeat_interleave(lengths, output_size=len(scores))
    _, totals, largest = exponentials_by_group(scores, sequence, len(lengths))
    inside = (positions >= 0) & (positions < lengths)
    at = (offsets[:-1] + positions).where(inside, 0)
    losses = (totals.log() + largest - scores[at]).where(inside, 0.0)
    return losses, inside.sum()


def shared_softmax_losses(scores: Tensor, softmax: Tensor, targets: Tensor, num_softmaxes: int) -> Tensor:
    """-log of the probability that all targets of a softmax have together: (num_softmaxes,), of scores (T,).

    Args:
        softmax: (T,) int64, in which one a score competes, -1 in none; each has a target.
        targets: (T,) bool.
    """
    competing = softmax >= 0
    scores, softmax, targets = scores[competing], softmax[competing], targets[competing]
    _, total, largest = exponentials_by_group(scores, softmax, num_softmaxes)
    # The targets' own largest score keeps their sum from vanishing where they are hopeless.
    _, right, hits = exponentials_by_group(scores[targets], softmax[targets], num_softmaxes)
    return total.log() + largest - right.log() - hits
