"""The contrastive loss against a plain loop."""

import math

import pytest
import torch
from torch.nn import functional

from cloze.launch.config import EmbeddingConfig
from cloze.launch.finetune.contrastive import contrastive_losses


def test_texts_that_are_the_same_are_no_negatives():
    """Against a loop; row 1 has row 0's positive, row 2 has its anchor as its hard negative."""
    torch.manual_seed(0)
    groups = torch.randn(4, 3, 6)
    texts = torch.tensor([[0, 1, 2], [3, 1, 4], [5, 6, 0], [7, 8, 9]])
    for same, symmetric in ((False, False), (False, True), (True, True)):
        config = EmbeddingConfig(temperature=0.3, symmetric=symmetric, same_text_negatives=same)
        losses, hits = contrastive_losses(groups, texts, slice(1, 3), config)
        for row, loss, hit in zip((1, 2), losses.tolist(), hits.tolist(), strict=True):
            anchor, positive, own = groups[row, 0], groups[row, 1], {int(texts[row, 0]), int(texts[row, 1])}
            others = [
                groups[r, c]
                for r in range(4)
                for c in (1, 2)
                if (r, c) != (row, 1) and (same or int(texts[r, c]) not in own)
            ]
            expected = _cross_entropy(anchor, positive, others)
            if symmetric:
                anchors = [groups[r, 0] for r in range(4) if r != row and (same or int(texts[r, 0]) not in own)]
                expected = (expected + _cross_entropy(positive, anchor, anchors)) / 2
            assert loss == pytest.approx(expected, abs=1e-5)
            nearest = max(_cosine(anchor, other) for other in others)
            assert hit == (_cosine(anchor, positive) >= nearest)


def _cosine(left, right) -> float:
    return functional.cosine_similarity(left, right, dim=0).item()


def _cross_entropy(query, right, others) -> float:
    scores = [_cosine(query, each) / 0.3 for each in (right, *others)]
    return math.log(sum(map(math.exp, scores))) - scores[0]
