"""BERT with one head, for everything but pretraining; each computes what its namesake in transformers does.

Inputs are those of BertModel.forward, in either layout. Losses come one for each example (or token), in fp32,
0 where the label is -100; `TaskOutput.loss` is their mean over the labelled ones.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from model.bert import BertForPreTraining, BertModel, BertPreTrained, PreTrainingOutput, encode_masked, pooled
from model.classifiers import Classifier, TaskOutput, with_states
from model.config import BertConfig, HeadConfig, ModelError
from model.heads import NO_LABEL, MaskedLanguageModelHead, NextSentenceHead, class_losses, exponentials_by_group, pool
from model.hub import load_architecture
from model.spans import BertForQuestionAnswering


class BertForMaskedLM(BertPreTrained):
    """Masked tokens only."""

    uses_pooler = False

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.masked_lm = MaskedLanguageModelHead(config, self.bert.embeddings.word)

    def forward(
        self, input_ids: Tensor | None = None, *, masked_positions: Tensor | None = None,
        labels: Tensor | None = None, **inputs,
    ) -> PreTrainingOutput:
        """As BertForPreTraining.forward, without next sentences."""
        encoded, hidden = encode_masked(self.bert, masked_positions, input_ids=input_ids, **inputs)
        predicted = self.masked_lm(hidden, labels)
        output = PreTrainingOutput(hidden_states=encoded.hidden_states, attentions=encoded.attentions)
        if labels is None:
            return output._replace(prediction_logits=predicted)
        return output._replace(mlm_losses=predicted[0], mlm_correct=predicted[1], num_masked=(labels != NO_LABEL).sum())


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
            num_pairs=(next_sentence_label != NO_LABEL).sum(),
        )


class BertForSequenceClassification(Classifier):
    """One vector a sequence (or pair) to classes, independent labels, several label columns, or numbers."""

    def __init__(self, config: BertConfig, head: HeadConfig | None = None, **options) -> None:
        super().__init__(config, head, **options)
        if self.head.pieces == "attention":
            self.piece_attention = nn.Linear(self.classifier.in_features, 1)

    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, piece_offsets: Tensor | None = None,
        **inputs,
    ) -> TaskOutput:
        """`labels`: (B,) int64 classes; (B, labels) of 0 and 1; (B, columns) int64; (B,) or (B, targets)
        numbers. `piece_offsets`: (B + 1,) int64, the first sequence of each text, and their number; None: one each.
        """
        vectors, encoded, seed = self.read(input_ids, inputs)
        if piece_offsets is not None:
            vectors = self.pool_pieces(vectors, piece_offsets)
        scores = self.classifier(self.transformed(vectors, seed))
        output = with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, num_labelled = self._losses(scores, labels)
        return output._replace(losses=losses, num_labelled=num_labelled)

    def features(self, input_ids: Tensor | None = None, *, piece_offsets: Tensor | None = None, **inputs) -> Tensor:
        """As every classifier's, one row a piece."""
        return super().features(input_ids, **inputs)

    def vectors(self, input_ids: Tensor | None = None, **inputs) -> Tensor:
        """(B, ...): what `pool_pieces` takes of each sequence."""
        return self.read(input_ids, inputs)[0]

    def classify(self, vectors: Tensor) -> Tensor:
        """Scores of texts, from their vectors, without dropout."""
        return self.classifier(self.transform(vectors))

    def pool_pieces(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """One vector a text, of its pieces' (pieces, ...), with the offsets (B + 1,) of the texts."""
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

    def _losses(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        problem = self.head.problem
        if problem == "single_label":
            return class_losses(scores, labels)[0], (labels != NO_LABEL).sum()
        if problem == "columns":
            parts = scores.split([len(classes) for _, classes in self.head.columns], dim=-1)
            losses = [class_losses(part, labels[:, column])[0] for column, part in enumerate(parts)]
            return torch.stack(losses, dim=1), (labels != NO_LABEL).sum(0)
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


class BertForTokenClassification(Classifier):
    """A class for each token."""

    uses_pooler = False
    reads_tokens = True

    def forward(self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **inputs) -> TaskOutput:
        """`labels`: (T,) or (B, S) int64, -100 at padding and at word pieces that are not scored."""
        scores, encoded = self.scores(input_ids, inputs)
        output = with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, _ = class_losses(scores, labels)
        return output._replace(losses=losses.flatten(), num_labelled=(labels != NO_LABEL).sum())


class BertForMultipleChoice(Classifier):
    """One of several sequences: each is scored, and the scores compete in a softmax."""

    def _num_outputs(self) -> int:
        return 1

    def features(self, input_ids: Tensor | None = None, *, num_choices: int | None = None, **inputs) -> Tensor:
        """As every classifier's, one row a choice."""
        return super().features(input_ids, **inputs)

    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, num_choices: int | None = None, **inputs
    ) -> TaskOutput:
        """Padded: ids (B, choices, S) or `inputs_embeds` (B, choices, S, hidden), masks and segments alike.
        Concatenated: choices one after another, with `num_choices`. `labels`: (B,) int64.
        """
        vectors = inputs.get("inputs_embeds")
        tokens = input_ids if vectors is None else vectors[..., 0]
        if tokens is not None and tokens.dim() == 3:
            num_choices = tokens.shape[1]
            input_ids = None if input_ids is None else input_ids.flatten(0, 1)
            padded = ("inputs_embeds", "token_type_ids", "attention_mask", "position_ids")
            inputs |= {name: inputs[name].flatten(0, 1) for name in padded if inputs.get(name) is not None}
        elif num_choices is None:
            raise ModelError("num_choices: expected with inputs that are not (B, choices, S); give it")
        scores, encoded = self.scores(input_ids, inputs)
        scores = scores.view(-1, num_choices)
        output = with_states(TaskOutput(scores), encoded)
        if labels is None:
            return output
        losses, _ = class_losses(scores, labels)
        return output._replace(losses=losses, num_labelled=(labels != NO_LABEL).sum())


ARCHITECTURES: dict[str, type[nn.Module]] = {
    each.__name__: each
    for each in (
        BertModel, BertForPreTraining, BertForMaskedLM, BertForNextSentencePrediction, BertForSequenceClassification,
        BertForTokenClassification, BertForMultipleChoice, BertForQuestionAnswering,
    )
}


def saved_class(folder: str | os.PathLike) -> type[nn.Module]:
    """Our class that a model folder was saved from. Raises ModelError if config.json names none, or one we lack."""
    name = load_architecture(folder)
    if name not in ARCHITECTURES:
        raise ModelError(f"{os.path.join(folder, 'config.json')}: found architecture {name}, expected one of "
                         f"{', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
