"""BERT with one head, for everything but pretraining; each computes what its namesake in transformers does.

Inputs are those of BertModel.forward, in either layout. Losses come one for each example (or token), in fp32,
0 where the label is -100; `TaskOutput.loss` is their mean over the labelled ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.bert import BertForPreTraining, BertModel, BertPreTrained, PreTrainingOutput, encode_masked, pooled
from model.config import BertConfig, HeadConfig, ModelError
from model.dropout import DropoutKey, draw_seed, dropout
from model.heads import (
    IGNORED,
    ClassifierTransform,
    LayerMix,
    MaskedLanguageModelHead,
    NextSentenceHead,
    class_losses,
    pool,
)


class TaskOutput(NamedTuple):
    """Scores and losses of a fine-tuned head."""

    logits: Tensor
    """(B, outputs); (T, outputs) or (B, S, outputs) for tokens; (B, choices) for multiple choice."""
    losses: Tensor | None = None
    """fp32, in the shape of the labels; (B,) where several outputs make one loss; None without labels."""
    num_labelled: Tensor | None = None
    """Examples (or tokens) with a label; (columns,) with several label columns."""
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def loss(self) -> Tensor | None:
        """Mean over the labelled examples, as in Hugging Face; summed over label columns; None without
        labels.
        """
        return None if self.losses is None else (self.losses.sum(0) / self.num_labelled).sum()


class BertForMaskedLM(BertPreTrained):
    """Masked tokens only."""

    uses_pooler = False

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.masked_lm = MaskedLanguageModelHead(config, self.bert.embeddings.word)

    def forward(
        self, input_ids: Tensor | None = None, *, masked_positions: Tensor | None = None,
        labels: Tensor | None = None, **inputs,
    ) -> PreTrainingOutput:  # fmt: skip
        """As BertForPreTraining.forward, without next sentences."""
        encoded, hidden = encode_masked(self.bert, masked_positions, input_ids=input_ids, **inputs)
        predicted = self.masked_lm(hidden, labels)
        output = PreTrainingOutput(hidden_states=encoded.hidden_states, attentions=encoded.attentions)
        if labels is None:
            return output._replace(prediction_logits=predicted)
        return output._replace(mlm_losses=predicted[0], mlm_correct=predicted[1], num_masked=(labels != IGNORED).sum())


class BertForNextSentencePrediction(BertPreTrained):
    """Next sentence only."""

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.next_sentence = NextSentenceHead(config)

    def forward(
        self, input_ids: Tensor | None = None, *, next_sentence_label: Tensor | None = None, **inputs
    ) -> PreTrainingOutput:
        """As BertForPreTraining.forward, without masked tokens."""
        encoded = self.bert(input_ids, **inputs)
        scores = self.next_sentence(pooled(encoded))
        output = PreTrainingOutput(
            next_sentence_logits=scores, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
        if next_sentence_label is None:
            return output
        losses, correct = class_losses(scores, next_sentence_label)
        return output._replace(
            next_sentence_losses=losses,
            next_sentence_correct=correct,
            num_pairs=(next_sentence_label != IGNORED).sum(),
        )


class _WithTransform(BertPreTrained):
    """What stands between the encoder and a linear map: the transform, if the model has one, and dropout.

    `forward` takes either ids or `features`: what `features` made of them before, so that an encoder that does not
    learn need not run again.
    """

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.transform = ClassifierTransform(config) if config.classifier_transform else nn.Identity()
        rate = config.classifier_dropout
        self.dropout_probability = config.hidden_dropout_prob if rate is None else rate

    def _encode(self, input_ids: Tensor | None, inputs: dict) -> tuple:
        """The encoder's output (None with `features`) and the seed of the classifier's dropout, drawn once for both."""
        given = "features" in inputs
        if not self.training:
            return None if given else self.bert(input_ids, **inputs), None
        seed = inputs.pop("dropout_seed", None)
        seed = draw_seed() if seed is None else seed
        place = DropoutKey(seed, self.config.num_hidden_layers + 1).at(0)
        return None if given else self.bert(input_ids, dropout_seed=seed, **inputs), place

    def _transform(self, features: Tensor, seed: int | None) -> Tensor:
        return dropout(self.transform(features), self.dropout_probability, seed)


class _Classifier(_WithTransform):
    """One linear map over whatever a subclass reads."""

    takes_head = True
    reads_tokens = False

    def __init__(self, config: BertConfig, head: HeadConfig | None = None, **options) -> None:
        super().__init__(config, **options)
        self.head = head or HeadConfig()
        layers = config.num_hidden_layers
        if self.head.layers == "last_four" and layers < 4:
            raise ModelError(f"head.layers: found last_four with {layers} layers, expected at least 4")
        if self.head.layers == "weighted":
            self.mix = LayerMix(layers)
        self.classifier = nn.Linear(config.hidden_size * (4 if self.head.layers == "last_four" else 1),
                                    self._num_outputs())

    def _num_outputs(self) -> int:
        return self.head.num_outputs

    def features(self, input_ids: Tensor | None = None, **inputs) -> Tensor:
        """What the head reads of the encoder: (B, layers read, hidden), of tokens (T, layers read, hidden)."""
        return self._features(self._encode(input_ids, self._asked(inputs))[0], inputs)

    def _asked(self, inputs: dict) -> dict:
        return inputs if self.head.layers == "last" else inputs | {"output_hidden_states": True}

    def _features(self, encoded, inputs: dict) -> Tensor:
        if self.head.layers == "last":
            states = (encoded.last_hidden_state,)
        else:
            states = encoded.hidden_states[-4 if self.head.layers == "last_four" else 1:]
        if self.reads_tokens:
            return torch.stack(states, -2)
        if self.head.pooling == "pooler":
            return encoded.first_hidden_state[:, None]
        places = inputs.get("sequence_offsets"), inputs.get("attention_mask")
        return torch.stack([pool(state, self.head.pooling, *places) for state in states], 1)

    def _vectors(self, features: Tensor) -> Tensor:
        """(..., layers read, hidden) -> (..., what the linear map takes)."""
        if self.head.layers == "weighted":
            return self.mix(features.flatten(0, -3)).view(*features.shape[:-2], -1)
        return features.flatten(-2)

    def _scores(self, input_ids: Tensor | None, inputs: dict) -> tuple:
        """Scores of the head, and the encoder's output, None where features stand for it."""
        encoded, seed = self._encode(input_ids, self._asked(inputs))
        features = inputs.get("features")
        if features is None and self.head.pooling == "pooler" and not self.reads_tokens:
            vectors = pooled(encoded)
        elif features is None:
            vectors = self._vectors(self._features(encoded, inputs))
        else:
            vectors = self._vectors(features)
            if self.head.pooling == "pooler" and not self.reads_tokens and self.bert.pooler is not None:
                vectors = self.bert.pooler(vectors)
        return self.classifier(self._transform(vectors, seed)), encoded


def _with_states(output: NamedTuple, encoded) -> NamedTuple:
    """The output with what the encoder was asked to give beside, if it ran."""
    if encoded is None:
        return output
    return output._replace(hidden_states=encoded.hidden_states, attentions=encoded.attentions)


class BertForSequenceClassification(_Classifier):
    """One vector a sequence (or pair) to classes, independent labels, several label columns, or numbers."""

    def forward(self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **inputs) -> TaskOutput:
        """`labels`: (B,) int64 classes; (B, labels) of 0 and 1; (B, columns) int64; (B,) or (B, targets)
        numbers.
        """
        scores, encoded = self._scores(input_ids, inputs)
        output = _with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, num_labelled = self._losses(scores, labels)
        return output._replace(losses=losses, num_labelled=num_labelled)

    def _losses(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.head.problem
        if problem == "single_label":
            return class_losses(scores, labels)[0], (labels != IGNORED).sum()
        if problem == "columns":
            parts = scores.split([len(classes) for _, classes in self.head.columns], dim=-1)
            losses = [class_losses(part, labels[:, column])[0] for column, part in enumerate(parts)]
            return torch.stack(losses, dim=1), (labels != IGNORED).sum(0)
        targets = labels.view(scores.shape).float()
        if problem == "multi_label":
            losses = nn.functional.binary_cross_entropy_with_logits(scores.float(), targets, reduction="none")
        else:
            losses = nn.functional.mse_loss(scores.float(), targets, reduction="none")
        return losses.mean(1), torch.tensor(len(scores), device=scores.device)

    def split_columns(self, logits: Tensor) -> dict[str, Tensor]:
        """(B, outputs) scores of several label columns -> name: (B, classes of that column)."""
        parts = logits.split([len(classes) for _, classes in self.head.columns], dim=-1)
        return {name: part for (name, _), part in zip(self.head.columns, parts, strict=True)}


class BertForTokenClassification(_Classifier):
    """A class for each token."""

    uses_pooler = False
    reads_tokens = True

    def forward(self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **inputs) -> TaskOutput:
        """`labels`: (T,) or (B, S) int64, -100 at padding and at word pieces that are not scored."""
        scores, encoded = self._scores(input_ids, inputs)
        output = _with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, _ = class_losses(scores, labels)
        return output._replace(losses=losses.flatten(), num_labelled=(labels != IGNORED).sum())


class BertForMultipleChoice(_Classifier):
    """One of several sequences: each is scored, and the scores compete in a softmax."""

    def _num_outputs(self) -> int:
        return 1

    def features(self, input_ids: Tensor | None = None, *, num_choices: int | None = None, **inputs) -> Tensor:
        """As every classifier's, one row a choice."""
        return super().features(input_ids, **inputs)

    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, num_choices: int | None = None, **inputs
    ) -> TaskOutput:
        """Padded: ids (B, choices, S), masks and segments alike. Concatenated: choices one after another,
        with `num_choices`. `labels`: (B,) int64.
        """
        if input_ids is not None and input_ids.dim() == 3:
            num_choices = input_ids.shape[1]
            input_ids = input_ids.flatten(0, 1)
            padded = ("token_type_ids", "attention_mask", "position_ids")
            inputs |= {name: inputs[name].flatten(0, 1) for name in padded if inputs.get(name) is not None}
        elif num_choices is None:
            raise ModelError("num_choices: expected with ids that are not (B, choices, S); give it")
        scores, encoded = self._scores(input_ids, inputs)
        scores = scores.view(-1, num_choices)
        output = _with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, _ = class_losses(scores, labels)
        return output._replace(losses=losses, num_labelled=(labels != IGNORED).sum())


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


class BertForQuestionAnswering(_WithTransform):
    """The span of the text that answers a question: a score for each token to be its start, and its end."""

    uses_pooler = False

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.span = nn.Linear(config.hidden_size, 2)

    def features(self, input_ids: Tensor | None = None, **inputs) -> Tensor:
        """What the head reads of the encoder: (T, hidden) or (B, S, hidden)."""
        return self._encode(input_ids, inputs)[0].last_hidden_state

    def forward(
        self, input_ids: Tensor | None = None, *, start_positions: Tensor | None = None,
        end_positions: Tensor | None = None, softmax: Tensor | None = None, start_targets: Tensor | None = None,
        end_targets: Tensor | None = None, num_softmaxes: int = 0, **inputs,
    ) -> SpanOutput:  # fmt: skip
        """Positions: (B,) int64 from the start of each sequence; outside of it (or negative) there is no
        loss.

        Instead of them, for tokens of several sequences that compete in one softmax: `softmax` (T,) int64, the number
        of each token's, below `num_softmaxes`, or -1; targets (T,) bool. Losses are then (num_softmaxes,).

        Over padded inputs the softmax runs over the padding too, as the reference's does.
        """
        encoded, seed = self._encode(input_ids, inputs)
        hidden = inputs["features"] if encoded is None else encoded.last_hidden_state
        if self.config.classifier_transform:  # BERT has neither transform nor dropout here
            hidden = self._transform(hidden, seed)
        start, end = self.span(hidden).unbind(-1)
        output = _with_states(SpanOutput(start, end), encoded)
        if softmax is not None:
            count = torch.tensor(num_softmaxes, device=start.device)
            return output._replace(
                start_losses=shared_softmax_losses(start.float(), softmax, start_targets, num_softmaxes),
                end_losses=shared_softmax_losses(end.float(), softmax, end_targets, num_softmaxes),
                num_starts=count, num_ends=count,
            )  # fmt: skip
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
        labels = positions.masked_fill((positions < 0) | (positions >= scores.shape[1]), IGNORED)
        return class_losses(scores, labels)[0], (labels != IGNORED).sum()
    scores, offsets = scores.float(), offsets.long()
    lengths = offsets.diff()
    sequence = torch.arange(len(lengths), device=lengths.device)
    sequence = sequence.repeat_interleave(lengths, output_size=len(scores))
    largest = torch.segment_reduce(scores.detach(), "max", offsets=offsets)
    totals = torch.zeros_like(largest).index_add(0, sequence, (scores - largest[sequence]).exp())
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
    largest = scores.new_full((num_softmaxes,), -torch.inf)
    largest = largest.scatter_reduce(0, softmax, scores.detach(), "amax")
    shares = (scores - largest[softmax]).exp()
    total = torch.zeros_like(largest).index_add(0, softmax, shares)
    # The targets' own largest score keeps their sum from vanishing where they are hopeless.
    hits = torch.full_like(largest, -torch.inf).scatter_reduce(0, softmax[targets], scores[targets].detach(), "amax")
    right = torch.zeros_like(largest).index_add(0, softmax[targets], (scores - hits[softmax])[targets].exp())
    return total.log() + largest - right.log() - hits


ARCHITECTURES: dict[str, type[nn.Module]] = {
    each.__name__: each
    for each in (
        BertModel, BertForPreTraining, BertForMaskedLM, BertForNextSentencePrediction, BertForSequenceClassification,
        BertForTokenClassification, BertForMultipleChoice, BertForQuestionAnswering,
    )
}  # fmt: skip
