"""Parameter groups by module type: which parameters have weight decay."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from cloze.launch.config import OptimizerConfig
from cloze.model.config import BertConfig
from cloze.model.embeddings import Embeddings
from cloze.model.encoder import EncoderLayer
from cloze.model.parametrization import Share, parameter_share
from cloze.model.relative import RelativeBias, RelativeEmbedding

_ROOTS = (Embeddings, RelativeBias, RelativeEmbedding)
Group = dict[str, Any]
"""A group of parameters, as torch.optim takes it: `params`, and the constants of their updates by name."""


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[Group]:
    """Groups of an optimizer; every trainable parameter is in exactly one, and none is empty.

    - `weight_decay`: matrices decay. Biases, norms (whatever has fewer than two dimensions) and, by choice, embeddings
      do not. A tied matrix belongs to the first module that owns it, so that a decoder tied to the embedding follows
      the embedding.
    - `lr_scale`: share of the learning rate, layer_decay ^ (layers above it): 1 for what stands on the encoder, least
      for the embeddings (arXiv 1801.06146, "discriminative fine-tuning"); times `embedding_rate` outside the layers.
      With `parametrization: mup` also times what the parameter's place and the optimizer give (`_update_shares`); its
      weight_decay is divided by that, so that a step shrinks it by as much, and `eps` follows the gradients' size.
    - `muon`: whether Muon updates it, which it does for the matrices of encoder layers; Muon's own recommendation
      leaves embeddings and heads to AdamW.
    """
    groups: dict[tuple[object, ...], Group] = {}
    depths, names = _depths(model), {id(each): name for name, each in model.named_parameters()}
    top = max(depths.values(), default=0) + 1
    for parameter, module in _owned(model):
        # ZeRO-3 leaves a partitioned parameter without a shape and keeps the true one in ds_shape.
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
        decays = is_matrix and (config.decay_embeddings or not isinstance(module, nn.Embedding | RelativeBias))
        depth = depths.get(id(module), top)
        in_layer = 0 < depth < top
        muon = config.name == "muon" and is_matrix and in_layer and isinstance(module, nn.Linear)
        outside = config.embedding_rate != 1 and not in_layer
        lr_scale = config.layer_decay ** (top - depth) * (config.embedding_rate if outside else 1)
        share = Share()
        if isinstance(shape := getattr(model, "config", None), BertConfig):
            share = parameter_share(shape, module, names[id(parameter)])
        rate, decay = _update_shares(share, config, is_matrix, muon)
        group = groups.setdefault(
            (muon, decays, lr_scale, outside, share, rate),
            {
                "name": ("muon_" if muon else "")
                + ("decay" if decays else "no_decay")
                + ("" if config.layer_decay == 1 else f"_{depth}")
                + ("_outside" if outside else "")
                + ("" if share == Share() else f"_size_{share.size:.3g}_rate_{rate:.3g}_eps_{share.eps:.3g}"),
                "params": [],
                "weight_decay": config.weight_decay * decay if decays else 0.0,
                "lr_scale": lr_scale * rate,
                "muon": muon,
                **({} if share.eps == 1 else {"eps": config.eps * share.eps}),
            },
        )
        group["params"].append(parameter)
    # Muon's first, then what decays, the deepest first: an order that does not hang on the model's.
    return sorted(groups.values(), key=lambda group: (not group["muon"], not group["weight_decay"], group["name"]))


def _update_shares(share: Share, config: OptimizerConfig, is_matrix: bool, muon: bool) -> tuple[float, float]:
    """Shares of the learning rate and of the weight decay for an optimizer's update, by the parameter's share.

    By the condition of arXiv 2310.17813, that an update's spectral norm is the same at every width: Adam's, of entries
    of one size, grows with the width, Muon's, of an orthogonal matrix of such entries, with the root of the width; and
    an update in proportion to the weights (LAMB's, hyperball's) has their initial size in it already.
    """
    if muon:
        return (1.0, 1.0) if config.matrix_decay == "hyperball" else (share.size, 1 / share.size)
    if config.name == "lamb":
        return (share.rate / share.size if is_matrix or config.adapt_undecayed else share.rate), 1 / share.size
    return share.rate, 1 / share.rate


def matrix_rows(model: nn.Module, matrices: Literal["whole", "maps", "heads"]) -> dict[Tensor, list[int]]:
    """The weights that Muon takes for several matrices one below the other, with the rows of each."""
    rows: dict[Tensor, list[int]] = {}
    if matrices == "whole":
        return rows
    for module in model.modules():
        for name, heights in getattr(module, "stacked", {}).items():
            if linear := getattr(module, name):
                size = getattr(module, "head_size", None) if matrices == "heads" else None
                rows[linear.weight] = [size or height for height in heights for _ in range(height // (size or height))]
    return rows


def _owned(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Module]]:
    """Every trainable parameter once, with the first module that owns it."""
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                yield parameter, module


def _depths(model: nn.Module) -> dict[int, int]:
    """Depth of the modules by id: 0 for all of the embeddings and what distances have, 1 for the first encoder layer
    with weights of its own, and so on.
    """
    roots = [module for module in model.modules() if isinstance(module, _ROOTS)]
    layers = [module for module in model.modules() if isinstance(module, EncoderLayer)]
    depths = {id(part): 0 for root in roots for part in root.modules()}
    return depths | {id(part): depth for depth, layer in enumerate(layers, start=1) for part in layer.modules()}
