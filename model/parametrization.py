"""Maximal update parametrization (`parametrization: mup`): initial sizes, learning rates and Adam's epsilon of each
parameter as functions of the model's width and depth, so that a rate found with a small model serves a large one.

The rules are those of Yang et al. 2022 (arXiv 2203.03466, table 8) for the width and of CompleteP (arXiv 2505.01618,
table 1) for the depth, where m is the width and n the number of layers, both as multiples of the base's:

- a layer's matrices: initial size 1/sqrt(m), rate 1/m;
- what a sub-layer adds to the residual stream: 1/n of it;
- the scores of the vocabulary: 1/m of them.

The published form multiplies activations by the last two. Here a multiplier is part of the weights before it, with its
initial size and its rate: under Adam that is the same (arXiv 2011.14522, "abc-parametrizations"), and the model remains
one that `transformers` knows. For 1/n these are the output maps of attention and feed-forward network, for 1/m the norm
before the vocabulary projection. The scores of attention need no multiplier, since heads become more and not larger.
"""

from typing import NamedTuple

from torch import nn

from cloze.model.config import BertConfig
from cloze.model.embeddings import Norm
from cloze.model.heads import VocabularyProjection


class Share(NamedTuple):
    """A parameter's constants as multiples of those that it has in the base shape."""

    size: float = 1.0
    """Of the initial weights; of norms their value."""
    rate: float = 1.0
    """Of Adam's learning rate."""
    eps: float = 1.0
    """Of what Adam adds to the root of the second moment: how large the gradient's entries are."""


def parameter_share(config: BertConfig, module: nn.Module, name: str) -> Share:
    """The share of one parameter.

    Args:
        module: what owns the parameter.
        name: the parameter's name in the model, such as `bert.encoder.layers.0.attention.qkv.weight`.
    """
    if config.parametrization == "standard":
        return Share()
    m, n = config.width_multiple, config.depth_multiple
    owner, _, leaf = name.rpartition(".")
    in_layer = ".layers." in name
    if isinstance(module, Norm):
        if owner.endswith("masked_lm.norm"):
            return Share(1 / m if leaf == "weight" else 1, 1 / m)
        if in_layer and config.norm_position == "post":  # on the stream, as many times as there are layers
            return Share(1, 1 / n, 1 / m)
        return Share(1, 1, 1 / (m * n) if in_layer else 1 / m)
    if isinstance(module, nn.Linear | nn.Conv1d):
        if owner.endswith((".classifier", ".score")):  # a number for each class, whatever the width
            return Share(1 / m, 1 / m) if leaf == "weight" else Share()
        if in_layer and owner.endswith(("attention.output", "feed_forward.down")):
            return Share(m**-0.5 / n, 1 / (m * n), 1 / m) if leaf == "weight" else Share(1, 1 / n, 1 / m)
        eps = 1 / (m * n) if in_layer else 1 / m
        return Share(m**-0.5, 1 / m, eps) if leaf == "weight" else Share(1, 1, eps)
    if isinstance(module, VocabularyProjection) and leaf == "bias":
        return Share()
    if leaf == "position_scale":  # its initial value falls with the width
        return Share(m**0.5, 1, 1 / m)
    return Share(1, 1, 1 / m)


def describe(config: BertConfig) -> str:
    """The parametrization of a model in words, for the table at a run's start."""
    if config.parametrization == "standard":
        return "standard"
    m, n = config.width_multiple, config.depth_multiple
    return (
        f"mup, {m:g} x the width of {config.base_hidden_size}, {n:g} x the depth of {config.base_num_layers}: initial "
        f"weights of layers x {m**-0.5:.3g}, of output maps x {m**-0.5 / n:.3g}; rates of Adam x {1 / m:.3g}, "
        f"x {1 / (m * n):.3g}, of Muon x {m**-0.5:.3g}, x {m**-0.5 / n:.3g}; scores of the vocabulary x {1 / m:.3g}"
    )
