"""What fine-tuned heads share: features of the encoder, the map to scores, their output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.bert import BertOutput, BertPreTrained, pooled
from model.config import BertConfig, HeadConfig, ModelError
from model.dropout import DropoutKey, draw_seed, dropout
from model.heads import ClassifierTransform, LayerMix, pool


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


class WithTransform(BertPreTrained):
    """What stands between the encoder and a linear map: the transform, if the model has one, and dropout.

    `forward` takes either ids or `features`: what `features` made of them before, so that an encoder that does not
    learn need not run again.
    """

    def __init__(self, config: BertConfig, **options) -> None:
        super().__init__(config, **options)
        self.transform = ClassifierTransform(config) if config.classifier_transform else nn.Identity()
        rate = config.classifier_dropout
        self.dropout_probability = config.hidden_dropout_prob if rate is None else rate

    def encode(self, input_ids: Tensor | None, inputs: dict) -> tuple[BertOutput | None, int | None]:
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

    @property
    def _reads_firsts(self) -> bool:
        """Of the last layer, the first token of each sequence and nothing else."""
        return not self.reads_tokens and (
            self.head.pooling == "pooler" or (self.head.pooling == "cls" and self.head.layers == "last")
        )

    def features(self, input_ids: Tensor | None = None, **inputs) -> Tensor:
        """What the head reads of the encoder: (B, layers read, hidden), of tokens (T, layers read, hidden)."""
        return self._features(self.encode(input_ids, self._asked(inputs))[0], inputs)

    def _asked(self, inputs: dict) -> dict:
        if self.head.layers != "last":
            return inputs | {"output_hidden_states": True}
        offsets = inputs.get("sequence_offsets")
        if self._reads_firsts and offsets is not None and not inputs.get("output_hidden_states"):
            # No token but the first: the last layer is spared all others.
            return inputs | {"read_tokens": offsets.new_empty(0, dtype=torch.int64)}
        return inputs

    def _features(self, encoded: BertOutput, inputs: dict) -> Tensor:
        if self.head.layers == "last":
            states = (encoded.last_hidden_state,)
        else:
            states = encoded.hidden_states[-4 if self.head.layers == "last_four" else 1:]
        if self.reads_tokens:
            return torch.stack(states, -2)
        if self._reads_firsts:
            return encoded.first_hidden_state[:, None]
        places = inputs.get("sequence_offsets"), inputs.get("attention_mask")
        return torch.stack([pool(state, self.head.pooling, *places) for state in states], 1)

    def _vectors(self, features: Tensor) -> Tensor:
        """(..., layers read, hidden) -> (..., what the linear map takes)."""
        if self.head.layers == "weighted":
            return self.mix(features.flatten(0, -3)).view(*features.shape[:-2], -1)
        return features.flatten(-2)

    def scores(self, input_ids: Tensor | None, inputs: dict) -> tuple[Tensor, BertOutput | None]:
        """Scores of the head, and the encoder's output, None where features stand for it."""
        vectors, encoded, seed = self.read(input_ids, inputs)
        return self.classifier(self.transformed(vectors, seed)), encoded

    def read(self, input_ids: Tensor | None, inputs: dict) -> tuple[Tensor, BertOutput | None, int | None]:
        """What the transform takes, the encoder's output, and the seed of dropout."""
        encoded, seed = self.encode(input_ids, self._asked(inputs))
        features = inputs.get("features")
        if features is None and self.head.pooling == "pooler" and not self.reads_tokens:
            vectors = pooled(encoded)
        elif features is None:
            vectors = self._vectors(self._features(encoded, inputs))
        else:
            vectors = self._vectors(features)
            if self.head.pooling == "pooler" and not self.reads_tokens and self.bert.pooler is not None:
                vectors = self.bert.pooler(vectors)
        return vectors, encoded, seed


def with_states(output: NamedTuple, encoded: BertOutput | None) -> NamedTuple:
    """The output with what the encoder was asked to give beside, if it ran."""
    if encoded is None:
        return output
    return output._replace(hidden_states=encoded.hidden_states, attentions=encoded.attentions)
