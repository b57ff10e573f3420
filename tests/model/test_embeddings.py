"""Positions and embeddings against the formulas of their papers."""

import dataclasses
import math

import pytest
import torch

from cloze.model import embeddings
from cloze.model.attention import alibi_slopes
from cloze.model.bert import BertForPreTraining, BertModel
from cloze.model.embeddings import rotary_tables, rotate_packed, sinusoidal_table
from cloze.model.initialization import init_weights
from tests.model.model_batches import TINY, batch, scramble


def test_sinusoids_and_slopes_are_those_of_their_papers():
    table = sinusoidal_table(50, 8)
    for position, column in ((0, 0), (0, 1), (7, 2), (49, 5)):
        angle = position / 10000 ** (2 * (column // 2) / 8)
        expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
        assert table[position, column] == pytest.approx(expected, abs=1e-5)
    assert alibi_slopes(8).tolist() == [2**-number for number in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_scaled_sinusoids_have_one_learned_factor_that_starts_small_and_is_saved(tmp_path):
    config = dataclasses.replace(TINY, position_embedding="scaled_sinusoidal", embedding_norm=False, type_vocab_size=0)
    model = BertModel(config).eval()
    factor = model.embeddings.position_scale
    with torch.no_grad():
        factor.fill_(3.0)
    init_weights(model, 0)
    assert factor.shape == (1,) and factor.item() == pytest.approx(32**-0.5)
    with torch.no_grad():
        factor.fill_(0.3)
    ids = torch.randint(5, 200, (2, 7))
    embedded = model.embeddings(ids, None, torch.arange(7))
    table = sinusoidal_table(7, 32)
    torch.testing.assert_close(embedded, model.embeddings.word.weight[ids] + 0.3 * table)
    embedded.sum().backward()
    torch.testing.assert_close(factor.grad, 2 * table.sum()[None])
    model.save(tmp_path)
    assert torch.equal(BertModel.from_folder(tmp_path).embeddings.position_scale, factor)


def test_rotation_keeps_lengths_and_makes_products_relative():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(1, 3 * 8, generator=generator).expand(40, -1)
    rotated = rotate_packed(packed, 2, 8, rotary_tables(torch.arange(40), 8, 10_000.0))
    query, key, value = rotated.view(40, 3, 8).unbind(1)
    torch.testing.assert_close(query.norm(dim=1), packed[:, :8].norm(dim=1))
    torch.testing.assert_close(value, packed[:, 16:])
    products = query @ key.t()
    for shift in (1, 5):  # depends on the distance only
        diagonal = products.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(300,), (3, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient_are_a_complex_product(shape, dtype, monkeypatch):
    """In blocks of 16 tokens, so that there are several and the last is smaller; three heads of queries share a key."""
    monkeypatch.setitem(embeddings._BLOCK_ELEMENTS, False, 16 * 4 * 8)
    positions = torch.arange(300).view(shape) % 64
    cosine, sine = rotary_tables(positions, 8, 10_000.0)
    turns = torch.complex(cosine, sine)[..., :4].to(torch.complex128)
    packed = torch.randn(*shape, 5 * 8).to(dtype).requires_grad_()
    rotated = rotate_packed(packed, 4, cosine.shape[-1], (cosine, sine))
    rotated.backward(towards := torch.randn_like(rotated))

    def expected(of: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        parts = of.detach().double().unflatten(-1, (5, 2, 4))
        turned = torch.complex(parts[..., :4, 0, :], parts[..., :4, 1, :]) * turns
        queries_keys = torch.stack((turned.real, turned.imag), dim=-2)
        return torch.cat((queries_keys, parts[..., 4:, :, :]), dim=-3).flatten(-3)

    rounding = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 2**-8}  # rounded once
    assert rotated.dtype == packed.grad.dtype == dtype
    torch.testing.assert_close(rotated.double(), expected(packed, turns), **rounding)
    torch.testing.assert_close(packed.grad.double(), expected(towards, turns.conj()), **rounding)


def test_embedding_dropout_can_be_turned_off_alone():
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.5, num_hidden_layers=1)
    ids = torch.randint(5, 200, (2, 30))
    for embedding_dropout in (True, False):
        model = scramble(BertModel(dataclasses.replace(config, embedding_dropout=embedding_dropout))).train()
        embeddings = model(ids, output_hidden_states=True, dropout_seed=1).hidden_states[0]
        assert ((embeddings == 0).float().mean() > 0.4) == embedding_dropout


def test_the_padding_segment_is_zero_and_stays_so():
    config = dataclasses.replace(TINY, type_vocab_size=3, segment_padding_index=0, embedding_norm=False)
    model = BertForPreTraining(config)
    init_weights(model, 0)
    weight = model.bert.embeddings.segment.weight
    assert (weight[0] == 0).all() and (weight[1:] != 0).all()
    padded = batch(config)
    padded["token_type_ids"] += padded["attention_mask"]
    model(**padded).loss.backward()
    assert (weight.grad[0] == 0).all() and (weight.grad[1] != 0).any()
