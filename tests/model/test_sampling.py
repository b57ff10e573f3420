"""Tokens drawn from logits."""

from __future__ import annotations

import torch

from cloze.model.sampling import draw_tokens, token_bits


def test_tokens_are_drawn_by_their_probabilities_for_any_split():
    torch.manual_seed(0)
    scores = torch.tensor([[2.0, 0.0, -1.0, 1.0, -60.0]])
    lengths = torch.full((400,), 20)
    tokens = torch.randint(0, 50, (8000,))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    positions = torch.arange(8000)
    bits = token_bits(7, tokens, offsets, positions)
    for temperature in (1.0, 2.0):
        found = torch.bincount(draw_tokens(scores.expand(8000, -1), bits, temperature), minlength=5) / 8000
        torch.testing.assert_close(found, (scores[0] / temperature).softmax(0), atol=0.015, rtol=0)
        assert found[4] == 0
    # A sequence alone, and in other company, draws the same; another seed, place or text draws anew.
    alone = token_bits(7, tokens[40:60], torch.tensor([0, 20]).int(), torch.arange(20))
    assert torch.equal(alone, bits[40:60])
    swapped = torch.cat((tokens[40:60], tokens[:20]))
    assert torch.equal(token_bits(7, swapped, torch.tensor([0, 20, 40]).int(), torch.arange(40))[20:], bits[:20])
    changed = tokens[40:60].clone()
    changed[5] += 1
    for other in (
        token_bits(8, tokens[40:60], torch.tensor([0, 20]).int(), torch.arange(20)),
        token_bits(7, changed, torch.tensor([0, 20]).int(), torch.arange(20)),
        alone.roll(1),
    ):
        assert not (other == alone).any()
    shares = bits.double() / 2**32
    assert abs(shares.mean() - 0.5) < 0.02 and abs(shares.var() - 1 / 12) < 0.005
    assert draw_tokens(scores.expand(0, -1), bits[:0]).shape == (0,)
