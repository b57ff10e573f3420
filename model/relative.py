"""Distances of tokens in the scores of attention, by one of two schemes.

The relative bias (T5, MPNet) is a learned number for each class of distances, added to the scores.

In disentangled attention (DeBERTa, arXiv 2006.03654) tokens attend to distances, and distances to tokens: a score has
up to two terms beside the product of a query and a key, the query times an embedding of their distance (c2p, content to
position), and the key times another one of it (p2c). All distances of a batch are 2 S - 1 numbers, S tokens being its
longest sequence, so the products of every token with every distance are one matrix product, whose diagonals are the
terms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cloze.model.config import BertConfig
from cloze.model.dropout import dropout
from cloze.model.embeddings import encoder_norm
from cloze.model.inputs import AutogradContext

# Distance in tokens from which on all are of one class in T5 (arXiv 1910.10683) and MPNet (arXiv 2004.09297).
_FARTHEST = 128


class RelativeBias(nn.Module):
    """A learned number for each head and class of distance between two tokens (T5, arXiv 1910.10683, section 2.1): half
    of the classes for each direction; of these, half for single distances, the others for ranges that grow by a factor.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.relative_position_buckets, config.num_attention_heads))

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """(1, heads, length, length)."""
        places = torch.arange(length, device=self.weight.device)
        half = len(self.weight) // 2
        distance = places[None, :] - places[:, None]
        near, far = half // 2, distance.abs()
        grown = (far / near).log() / math.log(_FARTHEST / near) * (half - near)
        classes = torch.where(far < near, far, (near + grown.clamp_min(0).long()).clamp_max(half - 1))
        bias = nn.functional.embedding(classes + half * (distance > 0), self.weight)
        return bias.permute(2, 0, 1)[None].to(dtype)


class Distances(NamedTuple):
    """Embeddings of the distances in a batch whose longest sequence has S tokens."""

    rows: Tensor
    """(N, hidden): of each row of the table that a distance has, ascending."""
    places: Tensor
    """(2 S - 1,) int64: the row of each distance, query minus key, from 1 - S to S - 1."""

    def dropped(self, probability: float, seed: int) -> Distances:
        """With dropout of the embeddings."""
        return self._replace(rows=dropout(self.rows, probability, seed))


class RelativeEmbedding(nn.Module):
    """A table of vectors of distances, which all layers share."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.span, self.buckets = config.relative_span, config.relative_buckets
        self.distances = config.relative_distances
        self.table = nn.Embedding(2 * self.span, config.hidden_size)
        self.norm = encoder_norm(config) if config.relative_norm else nn.Identity()

    def forward(self, length: int, dtype: torch.dtype) -> Distances:
        """The distances of `length` tokens, whose vectors are computed with in `dtype`."""
        device = self.table.weight.device
        furthest = self._furthest(length - 1)
        # The table has one more before than after.
        first, last = max(-furthest, -self.span), min(furthest, self.span - 1)
        buckets = self._bucket(torch.arange(1 - length, length, device=device)).clamp(first, last)
        rows = self.norm(self.table(torch.arange(first + self.span, last + self.span + 1, device=device)))
        return Distances(rows.to(dtype), buckets - first)

    def _bucket(self, distances: Tensor) -> Tensor:
        """int64 buckets: up to half of their number the distances themselves, from there on logarithmic (T5, arXiv
        1910.10683). All is in fp32, as in the released models: other roundings are other buckets.
        """
        if not self.buckets:
            return distances
        near = self.buckets // 2
        far = distances.abs().clamp_min(near)
        growth = torch.tensor((self.distances - 1) / near).log()
        logarithms = (torch.log(far / near) / growth * (near - 1)).ceil() + near
        return torch.where(distances.abs() <= near, distances, (logarithms * distances.sign()).long())

    def _furthest(self, distance: int) -> int:
        """The bucket of a distance, or one more: a bound that the host knows."""
        near = self.buckets // 2
        if not self.buckets or distance <= near:
            return distance
        growth = math.log((self.distances - 1) / near)
        return min(self.span, math.ceil(math.log(distance / near) / growth * (near - 1)) + near + 1)


class Positions(NamedTuple):
    """Queries and keys of distances in one layer, (2 S - 1, heads, head size), times the scale of the scores; None:
    there is no such term. Queries are of the distances 1 - S to S - 1, keys of S - 1 to 1 - S.
    """

    queries: Tensor | None
    keys: Tensor | None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, heads, S, S) terms of the scores of the tokens' `query` and `key` (B, S, heads, head size); S may be
        smaller than the batch's.
        """
        batch_size, length = query.shape[:2]
        products = [
            None if distances is None else _products(tokens, distances, length)
            for tokens, distances in ((query, self.keys), (key, self.queries))
        ]
        scores: Tensor = _Diagonals.apply(*products, batch_size)
        return scores


class RelativeTerms(nn.Module):
    """One layer's queries and keys of distances."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.terms = config.relative_terms
        self.heads, self.scale = config.num_attention_heads, config.score_scale
        width = config.hidden_size
        self.projection = nn.Linear(width, len(self.terms) * width) if config.relative_projections else None
        self.stacked = {"projection": [width] * len(self.terms)}

    def forward(self, distances: Distances, qkv: nn.Module) -> Positions:
        """The distances' queries and keys.

        Args:
            qkv: the layer's map of tokens, which distances share unless they have one of their own.
        """
        names = ("p2c", "c2p") if self.projection is None else self.terms
        if self.projection is None:
            parts = qkv(distances.rows).unflatten(-1, (3, self.heads, -1)).unbind(-3)[:2]
        else:
            parts = self.projection(distances.rows).unflatten(-1, (len(names), self.heads, -1)).unbind(-3)
        scaled = {name: part * self.scale for name, part in zip(names, parts, strict=True) if name in self.terms}
        # Of keys the last distance is the first, so that both kinds of products have their terms in the same places.
        indices = {"p2c": distances.places, "c2p": distances.places.flip(0)}
        chosen = {name: part.index_select(0, indices[name]) for name, part in scaled.items()}
        return Positions(chosen.get("p2c"), chosen.get("c2p"))


def _products(tokens: Tensor, distances: Tensor, length: int) -> Tensor:
    """(B, S, heads, head size) and those of the distances -> (heads, B * S, 2 S - 1)."""
    middle = len(distances) // 2
    nearby = distances[middle - length + 1 : middle + length]
    return torch.bmm(tokens.permute(2, 0, 1, 3).flatten(1, 2), nearby.permute(1, 2, 0))


class _Diagonals(torch.autograd.Function):
    """The diagonals of products: of those by query, (heads, B * S, 2 S - 1), element (i, S - 1 - i + j) is the term of
    query i and key j, of those by key the same with i and j exchanged. The sum of both is (B, heads, S, S).
    """

    @staticmethod
    def forward(ctx: AutogradContext, by_query: Tensor | None, by_key: Tensor | None, batch_size: int) -> Tensor:
        ctx.batch_size = batch_size
        terms = [] if by_query is None else [_diagonals(by_query, batch_size)]
        if by_key is not None:
            terms.append(_diagonals(by_key, batch_size).mT)
        total = terms[0].new_empty(terms[0].shape)
        return torch.add(*terms, out=total) if len(terms) == 2 else total.copy_(terms[0])

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gradients: list[Tensor | None] = []
        for needed, gradient_of_term in zip(ctx.needs_input_grad, (gradient, gradient.mT), strict=False):
            rows = None
            if needed:
                batch_size, heads, length, _ = gradient_of_term.shape
                rows = gradient_of_term.new_zeros(heads, batch_size * length, 2 * length - 1)
                _diagonals(rows, batch_size).copy_(gradient_of_term)
            gradients.append(rows)
        return gradients[0], gradients[1], None


def _diagonals(products: Tensor, batch_size: int) -> Tensor:
    """(heads, B * S, 2 S - 1) -> (B, heads, S, S), a view."""
    heads, rows, width = products.shape
    length = rows // batch_size
    strides = (length * width, rows * width, width - 1, 1)
    return products.as_strided((batch_size, heads, length, length), strides, products.storage_offset() + length - 1)
