"""FLOPs of a training step from its real tokens: those of the mathematics, without padding and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from cloze.model.config import BertConfig


def encoder_weights(config: BertConfig) -> int:
    """Number of weights in the matrices that every token is multiplied with."""
    up = 2 if config.gated_feed_forward else 1
    attention = 4 * config.hidden_size**2
    return config.num_hidden_layers * (attention + (up + 1) * config.hidden_size * config.intermediate_size)


def training_flops(
    config: BertConfig, sequence_lengths: Iterable[float], num_masked: float,
    *, summed: bool = False,
) -> float:
    """FLOPs of forward and backward of a batch, without additional work of the kernels.

    6 N T for the encoder's N weights and T tokens, 12 L H (sum of squared lengths) for attention, and
    6 masked (H V + H²) for the vocabulary; pooler and next-sentence head are below a thousandth and neglected. With
    another embedding size E: 6 masked (E V + E H) for the vocabulary, 6 E H T for the map into the encoder.
    `sequence_lengths`: in tokens; or, with summed=True, (number of tokens, sum of squared lengths). Layers with local
    attention count their window instead of the square.
    """
    if summed:
        num_tokens, squares = sequence_lengths
    else:
        lengths = list(sequence_lengths)
        num_tokens, squares = sum(lengths), sum(length * length for length in lengths)
    width = config.hidden_size
    num_local = sum(config.attends_locally(layer) for layer in range(config.num_hidden_layers))
    local_squares = min(squares, num_tokens * (config.local_attention_window + 1))
    seen = (config.num_hidden_layers - num_local) * squares + num_local * local_squares
    narrow = config.embedding_width
    head = narrow * config.vocab_size + (width * narrow if config.mlm_head != "linear" else 0)
    every = encoder_weights(config) + (narrow * width if narrow != width else 0)
    return 6.0 * every * num_tokens + 12.0 * width * seen + 6.0 * num_masked * head


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
