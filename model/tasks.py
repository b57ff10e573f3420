"""Models with one head for fine-tuning (and ELECTRA's discriminator), equivalent to the classes of transformers of the
same names.

Inputs are those of BertModel.forward, in either layout. Losses are per example (or token), in fp32, 0 where the label
is -100; `TaskOutput.loss` is the mean over labelled ones. The order: shared parts of heads, extractive question
answering, other heads.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from cloze.model.bert import (
    BertForPreTraining,
    BertModel,
    BertOutput,
    BertPreTrained,
    PreTrainingOutput,
    WithPretrainingHeads,
    encode_masked,
    pooled,
    reading_no_others,
)
from cloze.model.config import BertConfig, ModelError
from cloze.model.dropout import DropoutKey, draw_seed, dropout
from cloze.model.heads import (
    NO_LABEL,
    ClassifierTransform,
    DetectionHead,
    LayerMix,
    class_losses,
    exponentials_by_group,
)
from cloze.model.huggingface import InFolders, load_architecture
from cloze.model.inputs import Inputs, ModelOptions
from cloze.model.problems import HeadConfig
from cloze.model.sentence_vectors import pool

if TYPE_CHECKING:  # Python 3.10 lacks it
    from typing import Unpack


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
        """Mean over the labelled examples, as in Hugging Face; summed over label columns; None without labels."""
        if self.losses is None or self.num_labelled is None:
            return None
        return (self.losses.sum(0) / self.num_labelled).sum()


class WithTransform(BertPreTrained):
    """The layers between encoder and classifier: the transform, if the model has one, and dropout.

    `forward` takes either ids or the results of `features`, so that a frozen encoder need not run again.
    """

    def __init__(self, config: BertConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        self.transform = ClassifierTransform(config) if config.classifier_transform else nn.Identity()
        self.dropout_probability = config.dropout_before_classifier

    def encode(self, input_ids: Tensor | None, inputs: Inputs) -> tuple[BertOutput | None, int | None]:
        """The encoder's output (None with `features`) and the seed of the classifier's dropout, drawn once for both."""
        given = "features" in inputs
        if not self.training:
            return None if given else self.bert(input_ids, **inputs), None
        seed = inputs.pop("dropout_seed", None)
        seed = draw_seed() if seed is None else seed
        place = DropoutKey(seed, self.config.num_hidden_layers + 1).at(0)
        return None if given else self.bert(input_ids, dropout_seed=seed, **inputs), place

    def transformed(self, features: Tensor, seed: int | None) -> Tensor:
        return dropout(self.transform(features), self.dropout_probability, seed)


class Classifier(WithTransform):
    """A linear classifier on the vectors that a subclass selects."""

    takes_head = True
    reads_tokens = False

    def __init__(self, config: BertConfig, head: HeadConfig | None = None, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        self.head = head or HeadConfig()
        layers = config.num_hidden_layers
        if self.head.layers == "last_four" and layers < 4:
            raise ModelError(f"head.layers: found last_four with {layers} layers, expected at least 4")
        if self.head.layers == "weighted":
            self.mix = LayerMix(layers)
        self.classifier = nn.Linear(
            config.hidden_size * (4 if self.head.layers == "last_four" else 1), self._num_outputs()
        )

    def _num_outputs(self) -> int:
        return self.head.num_outputs

    @property
    def _reads_firsts(self) -> bool:
        """Whether only the first token of each sequence is read, from the last layer."""
        return not self.reads_tokens and (
            self.head.pooling == "pooler" or (self.head.pooling == "cls" and self.head.layers == "last")
        )

    def features(self, input_ids: Tensor | None = None, **inputs: Unpack[Inputs]) -> Tensor:
        """The encoder's vectors that the head reads: (B, layers read, hidden), for token heads (T, layers read,
        hidden).
        """
        encoded, _ = self.encode(input_ids, self._asked(inputs))
        assert encoded is not None, "features of features"
        return self._features(encoded, inputs)

    def _asked(self, inputs: Inputs) -> Inputs:
        if self.head.layers != "last":
            return inputs | {"output_hidden_states": True}
        offsets = inputs.get("sequence_offsets")
        if self._reads_firsts and offsets is not None and not inputs.get("output_hidden_states"):
            return inputs | {"read_tokens": reading_no_others(offsets)}
        return inputs

    def _features(self, encoded: BertOutput, inputs: Inputs) -> Tensor:
        if self.head.layers == "last":
            states: tuple[Tensor, ...] = (encoded.last_hidden_state,)
        else:
            assert encoded.hidden_states is not None, "_asked asks for them"
            states = encoded.hidden_states[-4 if self.head.layers == "last_four" else 1 :]
        if self.reads_tokens:
            return torch.stack(states, -2)
        if self._reads_firsts:
            return encoded.first_hidden_state[:, None]
        places = inputs.get("sequence_offsets"), inputs.get("attention_mask")
        pooling = "mean" if self.head.pooling == "pooled_mean" else self.head.pooling
        return torch.stack([pool(state, pooling, *places) for state in states], 1)

    def _vectors(self, features: Tensor) -> Tensor:
        """(..., layers read, hidden) -> (..., inputs of the linear layer)."""
        if self.head.layers == "weighted":
            mixed: Tensor = self.mix(features.flatten(0, -3)).view(*features.shape[:-2], -1)
            return mixed
        return features.flatten(-2)

    def scores(self, input_ids: Tensor | None, inputs: Inputs) -> tuple[Tensor, BertOutput | None]:
        """Scores of the head, and the encoder's output, None with features."""
        vectors, encoded, seed = self.read(input_ids, inputs)
        return self.classifier(self.transformed(vectors, seed)), encoded

    def read(self, input_ids: Tensor | None, inputs: Inputs) -> tuple[Tensor, BertOutput | None, int | None]:
        """Inputs of the transform, the encoder's output, and the seed of dropout."""
        encoded, seed = self.encode(input_ids, self._asked(inputs))
        pooling = "" if self.reads_tokens else self.head.pooling
        if encoded is not None and pooling == "pooler":
            vectors = pooled(encoded)
        elif encoded is not None and pooling == "late":
            tokens = (
                encoded.last_hidden_state if self.bert.pooler is None else self.bert.pooler(encoded.last_hidden_state)
            )
            vectors = pool(tokens, "mean", inputs.get("sequence_offsets"), inputs.get("attention_mask"))
        else:
            vectors = self._vectors(inputs["features"] if encoded is None else self._features(encoded, inputs))
            if pooling in ("pooler", "pooled_mean") and self.bert.pooler is not None:
                vectors = self.bert.pooler(vectors)
        return vectors, encoded, seed


def _classified(scores: Tensor, encoded: BertOutput | None, labels: Tensor | None) -> TaskOutput:
    """The output of scores (..., classes) of one class each."""
    output = with_states(TaskOutput(scores), encoded)
    if labels is None:
        return output
    losses, _ = class_losses(scores, labels)
    return output._replace(losses=losses.flatten(), num_labelled=(labels != NO_LABEL).sum())


def with_states(output: _Output, encoded: BertOutput | None) -> _Output:
    """The output with the encoder's requested hidden states and attentions, if the encoder ran."""
    if encoded is None:
        return output
    return output._replace(hidden_states=encoded.hidden_states, attentions=encoded.attentions)


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
        if self.start_losses is None or self.end_losses is None or self.num_starts is None or self.num_ends is None:
            return None
        return (self.start_losses.sum() / self.num_starts + self.end_losses.sum() / self.num_ends) / 2


_Output = TypeVar("_Output", TaskOutput, SpanOutput)


class BertForQuestionAnswering(WithTransform):
    """Extractive question answering: scores of each token as start and end of the answer."""

    uses_pooler = False

    def __init__(self, config: BertConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        self.span = nn.Linear(config.hidden_size, 2)

    def features(self, input_ids: Tensor | None = None, **inputs: Unpack[Inputs]) -> Tensor:
        """The encoder's vectors that the head reads: (T, hidden) or (B, S, hidden)."""
        encoded, _ = self.encode(input_ids, inputs)
        assert encoded is not None, "features of features"
        return encoded.last_hidden_state

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        softmax: Tensor | None = None,
        start_targets: Tensor | None = None,
        end_targets: Tensor | None = None,
        num_softmaxes: int = 0,
        **inputs: Unpack[Inputs],
    ) -> SpanOutput:
        """Positions: (B,) int64 from the start of each sequence; outside of it (or negative): no loss.

        Alternatively tokens of several sequences compete in one softmax: `softmax` (T,) int64, the index of each
        token's softmax, below `num_softmaxes`, or -1 for none; targets (T,) bool. Losses are then (num_softmaxes,).

        With padded inputs the softmax includes the padding, as in transformers.
        """
        encoded, seed = self.encode(input_ids, inputs)
        hidden = inputs["features"] if encoded is None else encoded.last_hidden_state
        if self.config.classifier_transform:  # BERT has neither transform nor dropout in this head
            hidden = self.transformed(hidden, seed)
        start, end = self.span(hidden).unbind(-1)
        output = with_states(SpanOutput(start, end), encoded)
        if softmax is not None and start_targets is not None and end_targets is not None:
            count = torch.tensor(num_softmaxes, device=start.device)
            return output._replace(
                start_losses=shared_softmax_losses(start.float(), softmax, start_targets, num_softmaxes),
                end_losses=shared_softmax_losses(end.float(), softmax, end_targets, num_softmaxes),
                num_starts=count,
                num_ends=count,
            )
        if start_positions is None or end_positions is None:
            return output
        offsets = inputs.get("sequence_offsets")
        losses = [_span_losses(*pair, offsets) for pair in ((start, start_positions), (end, end_positions))]
        return output._replace(
            start_losses=losses[0][0], end_losses=losses[1][0], num_starts=losses[0][1], num_ends=losses[1][1]
        )


def _span_losses(scores: Tensor, positions: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses (B,) and their number, from scores (B, S), or (T,) with the offsets of the sequences."""
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
    """-log of the total probability of all targets of each softmax: (num_softmaxes,), from scores (T,).

    Args:
        softmax: (T,) int64, index of each score's softmax, -1 for none; each softmax has a target.
        targets: (T,) bool.
    """
    competing = softmax >= 0
    scores, softmax, targets = scores[competing], softmax[competing], targets[competing]
    _, total, largest = exponentials_by_group(scores, softmax, num_softmaxes)
    # Relative to the targets' own maximum, so that their sum does not underflow for improbable targets.
    _, right, hits = exponentials_by_group(scores[targets], softmax[targets], num_softmaxes)
    return total.log() + largest - right.log() - hits


class BertForMaskedLM(WithPretrainingHeads):
    """Masked tokens only."""

    uses_pooler = predicts_pairs = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        masked_positions: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Unpack[Inputs],
    ) -> PreTrainingOutput:
        """As BertForPreTraining.forward, without next sentences."""
        return self.predictions(*encode_masked(self.bert, masked_positions, input_ids, **inputs), labels, None)


class BertForNextSentencePrediction(WithPretrainingHeads):
    """Next sentence only."""

    predicts_tokens = False

    def forward(
        self, input_ids: Tensor | None = None, *, next_sentence_label: Tensor | None = None, **inputs: Unpack[Inputs]
    ) -> PreTrainingOutput:
        """As BertForPreTraining.forward, without masked tokens."""
        encoded = self.bert(input_ids, **inputs)
        return self.predictions(encoded, encoded.last_hidden_state, None, next_sentence_label)


class DetectionOutput(NamedTuple):
    """Scores and losses of replaced-token detection: T tokens, or (B, S)."""

    logits: Tensor
    """Scores, above 0 for replaced, in the shape of the tokens."""
    losses: Tensor | None = None
    """fp32, binary cross-entropy; None without labels."""
    correct: Tensor | None = None
    """bool."""


class BertForReplacedTokenDetection(BertPreTrained):
    """Detection of tokens replaced by a generator: ELECTRA's discriminator (arXiv 2003.10555)."""

    uses_pooler = False

    def __init__(self, config: BertConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        self.detection = DetectionHead(config)

    def forward(
        self, input_ids: Tensor | None = None, *, replaced: Tensor | None = None, **inputs: Unpack[Inputs]
    ) -> DetectionOutput:
        """Takes the inputs of BertModel.forward, and labels for losses.

        Args:
            replaced: bool in the shape of the tokens.
        """
        scores = self.detection(self.bert(input_ids, **inputs).last_hidden_state)
        return (
            DetectionOutput(scores)
            if replaced is None
            else DetectionOutput(scores, *detection_losses(scores, replaced))
        )


def detection_losses(scores: Tensor, replaced: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy, fp32, and bool hits of the tokens' scores.

    Args:
        replaced: bool, in their shape.
    """
    losses = nn.functional.binary_cross_entropy_with_logits(scores.float(), replaced.float(), reduction="none")
    return losses, (scores > 0) == replaced


class BertForSequenceClassification(Classifier):
    """Classification of sequences or pairs: classes, independent labels, several label columns, or numbers
    (regression).
    """

    def __init__(self, config: BertConfig, head: HeadConfig | None = None, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, head, **options)
        if self.head.pieces == "attention":
            self.piece_attention = nn.Linear(self.classifier.in_features, 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        piece_offsets: Tensor | None = None,
        **inputs: Unpack[Inputs],
    ) -> TaskOutput:
        """Takes the inputs of BertModel.forward, and labels for losses.

        Args:
            labels: (B,) int64 classes; (B, labels) of 0 and 1; (B, columns) int64; (B,) or (B, targets) numbers.
            piece_offsets: (B + 1,) int64, the first sequence of each text, and their number; None: one each.
        """
        vectors, encoded, seed = self.read(input_ids, inputs)
        if piece_offsets is not None:
            vectors = self.pool_pieces(vectors, piece_offsets)
        scores = self.classifier(self.transformed(vectors, seed))
        output = with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, num_labelled = self.head.losses(scores, labels)
        return output._replace(losses=losses, num_labelled=num_labelled)

    def features(
        self, input_ids: Tensor | None = None, *, piece_offsets: Tensor | None = None, **inputs: Unpack[Inputs]
    ) -> Tensor:
        """As Classifier.features, with one row per piece."""
        return super().features(input_ids, **inputs)

    def vectors(self, input_ids: Tensor | None = None, **inputs: Unpack[Inputs]) -> Tensor:
        """The input of `pool_pieces` for each sequence, (B, ...)."""
        return self.read(input_ids, inputs)[0]

    def classify(self, vectors: Tensor) -> Tensor:
        """Scores of texts, from their vectors, without dropout."""
        scores: Tensor = self.classifier(self.transform(vectors))
        return scores

    def pool_pieces(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """One vector per text, pooled from its pieces' (pieces, ...), with the offsets (B + 1,) of the texts."""
        if self.head.pieces == "none":
            raise ModelError("piece_offsets: found them with head.pieces = none, expected max, mean or attention")
        if self.head.pieces != "attention":
            return pool(vectors, self.head.pieces, offsets)
        text = torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff().long())
        scores = self.piece_attention(vectors).squeeze(-1).float()
        shares, sums, _ = exponentials_by_group(scores, text, len(offsets) - 1)
        shares = shares / sums[text]
        summed = torch.zeros(len(offsets) - 1, vectors.shape[1], device=vectors.device)
        return summed.index_add(0, text, vectors.float() * shares[:, None]).to(vectors.dtype)


class BertForTokenClassification(Classifier):
    """A class for each token."""

    uses_pooler = False
    reads_tokens = True

    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **inputs: Unpack[Inputs]
    ) -> TaskOutput:
        """Takes the inputs of BertModel.forward, and labels for losses.

        Args:
            labels: (T,) or (B, S) int64, -100 at padding and at word pieces that are not scored.
        """
        return _classified(*self.scores(input_ids, inputs), labels)


def _without_choices(tensor: Tensor | None) -> Tensor | None:
    """(B, choices, ...) -> (B * choices, ...)."""
    return None if tensor is None else tensor.flatten(0, 1)


class BertForMultipleChoice(Classifier):
    """One of several sequences: each is scored, and the scores compete in a softmax."""

    def _num_outputs(self) -> int:
        return 1

    def features(
        self, input_ids: Tensor | None = None, *, num_choices: int | None = None, **inputs: Unpack[Inputs]
    ) -> Tensor:
        """As Classifier.features, with one row per choice."""
        return super().features(input_ids, **inputs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_choices: int | None = None,
        **inputs: Unpack[Inputs],
    ) -> TaskOutput:
        """Padded: ids (B, choices, S) or `inputs_embeds` (B, choices, S, hidden), masks and segments alike.
        Concatenated: choices one after another, with `num_choices`.

        Args:
            labels: (B,) int64.
        """
        vectors = inputs.get("inputs_embeds")
        tokens = input_ids if vectors is None else vectors[..., 0]
        if tokens is not None and tokens.dim() == 3:
            num_choices = tokens.shape[1]
            input_ids = None if input_ids is None else input_ids.flatten(0, 1)
            flat: Inputs = {
                "inputs_embeds": _without_choices(vectors),
                "token_type_ids": _without_choices(inputs.get("token_type_ids")),
                "attention_mask": _without_choices(inputs.get("attention_mask")),
                "position_ids": _without_choices(inputs.get("position_ids")),
            }
            inputs |= flat
        elif num_choices is None:
            raise ModelError("num_choices: expected with inputs that are not (B, choices, S); give it")
        scores, encoded = self.scores(input_ids, inputs)
        return _classified(scores.view(-1, num_choices), encoded, labels)


_CLASSES: tuple[type[InFolders], ...] = (
    BertModel,
    BertForPreTraining,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertForMultipleChoice,
    BertForQuestionAnswering,
)
ARCHITECTURES = {each.__name__: each for each in _CLASSES}


def saved_class(folder: str | os.PathLike[str]) -> type[InFolders]:
    """The class of a model folder.

    Raises:
        ModelError: config.json names none, or an unsupported one.
    """
    name = load_architecture(folder)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{os.path.join(folder, 'config.json')}: found architecture {name}, expected one of "
            f"{', '.join(ARCHITECTURES)}, or one of another family like them; the encoder alone is read after "
            "AutoModel.from_pretrained(MODEL).save_pretrained(FOLDER) in transformers"
        )
    return ARCHITECTURES[name]
