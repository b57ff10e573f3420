"""FLOPs of a training step from its real tokens: those of the mathematics, without padding and recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cloze.model.config import BertConfig


@dataclass(frozen=True)
class TokenCounts:
    """The sizes of a batch that its FLOPs depend on (fractions, for the mean of a corpus)."""

    tokens: float
    """Number of tokens of all sequences, padding not counted."""
    squares: float
    """Sum of the squared lengths of the sequences."""
    masked: float
    """Number of tokens whose vocabulary logits are computed."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[float], masked: float) -> TokenCounts:
        """Counts of sequences with these lengths, in tokens."""
        return cls(sum(lengths), sum(length * length for length in lengths), masked)

    @classmethod
    def of_micro_batch(cls, micro_batch: Mapping[str, Tensor]) -> TokenCounts:
        """Counts of a concatenated micro-batch, as forward takes it; without `labels` (N,), masked is 0."""
        lengths = micro_batch["sequence_offsets"].long().diff()
        masked = len(micro_batch["labels"]) if "labels" in micro_batch else 0
        return cls(int(lengths.sum()), int((lengths * lengths).sum()), masked)


def encoder_weights(config: BertConfig) -> int:
    """Number of weights in the matrices that every token is multiplied with."""
    up = 2 if config.gated_feed_forward else 1
    attention = 2 * config.hidden_size * (config.hidden_size + config.key_value_width)
    convolution = config.convolution_size * config.hidden_size**2
    return convolution + config.num_hidden_layers * (
        attention + (up + 1) * config.hidden_size * config.intermediate_size
    )


def training_flops(config: BertConfig, counts: TokenCounts) -> float:
    """FLOPs of forward and backward of a batch, without additional work of the kernels.

    6 N T for the encoder's N weights and T tokens, 12 L H (sum of squared lengths) for attention, and
    6 masked (H V + H²) for the vocabulary; pooler and next-sentence head are below a thousandth and left out. With
    embeddings of another width E: 6 masked (E V + E H) for the vocabulary, 6 E H T for the map into the encoder.
    Layers with local attention count their window instead of the square. Each term of disentangled attention counts as
    the scores do, half of what attention does; the maps of distances, whose number does not depend on the tokens', are
    left out.
    """
    width = config.hidden_size
    num_local = sum(config.attends_locally(layer) for layer in range(config.num_hidden_layers))
    local_squares = min(counts.squares, counts.tokens * (config.local_attention_window + 1))
    seen = (config.num_hidden_layers - num_local) * counts.squares + num_local * local_squares
    narrow = config.embedding_width
    head = narrow * config.vocab_size + (width * narrow if config.mlm_head != "linear" else 0)
    every = encoder_weights(config) + (narrow * width if narrow != width else 0)
    attention = 12.0 + 6.0 * len(config.relative_terms)
    return 6.0 * every * counts.tokens + attention * width * seen + 6.0 * counts.masked * head


def unread_flops(config: BertConfig, num_tokens: int, num_read: int) -> float:
    """FLOPs counted by `training_flops` that are not computed: after its attention the last layer processes only the
    tokens that are read (the masked ones and the first of each sequence). Published counts, which `training_flops`
    follows, ignore that.
    """
    up = 2 if config.gated_feed_forward else 1
    weights = config.hidden_size**2 + (up + 1) * config.hidden_size * config.intermediate_size
    return 6.0 * weights * (num_tokens - num_read)


def num_parameters(model: nn.Module) -> int:
    """Number of trainable weights of a model, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
