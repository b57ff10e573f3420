"""Disentangled attention: buckets of distances against transformers, scores against a loop, and what surrounds them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from cloze.model.attention import check_kernel, select_kernel
from cloze.model.config import BertConfig, ModelError
from cloze.model.flops import TokenCounts, training_flops, unread_flops
from cloze.model.relative import Positions, RelativeEmbedding
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

RELATIVE = dataclasses.replace(TINY, relative_attention="both", relative_buckets=8, relative_distances=20)


@pytest.mark.parametrize("buckets, furthest", [(0, 5), (0, 800), (256, 512), (8, 37), (13, 20), (2, 9)])
def test_a_distance_has_the_vector_that_the_released_models_give_it(buckets, furthest):
    table = RelativeEmbedding(
        dataclasses.replace(RELATIVE, relative_buckets=buckets, relative_distances=furthest, hidden_size=4)
    )
    span = buckets or furthest
    for length in (1, 2, 6, 37, 300, 700):
        found = table(length, torch.float32)
        tokens = torch.zeros(1, length, 1)
        theirs = build_relative_position(tokens, tokens, buckets or -1, furthest)[0].add(span).clamp(0, 2 * span - 1)
        places = torch.arange(length)
        distances = places[:, None] - places + length - 1
        assert torch.equal(found.rows[found.places[distances]], table.table(theirs))
        assert len(found.rows) <= min(2 * span, 2 * length + 1), "no more are projected than are used, but for two"


@pytest.mark.parametrize("terms", ["both", "c2p", "p2c"])
def test_scores_and_gradients_are_those_of_a_loop_over_pairs(terms):
    """For sequences that are shorter than the longest of the batch, too."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, 5, 3, 4, generator=generator, requires_grad=True) for _ in range(2))
    queries, keys = (torch.randn(13, 3, 4, generator=generator, requires_grad=True) for _ in range(2))
    positions = Positions(None if terms == "c2p" else queries, None if terms == "p2c" else keys)
    expected = torch.zeros(2, 3, 5, 5)
    for i in range(5):
        for j in range(5):
            distance = i - j + 6  # of a batch whose longest sequence has 7 tokens
            if terms != "p2c":
                expected[:, :, i, j] += (query[:, i] * keys[12 - distance]).sum(-1)
            if terms != "c2p":
                expected[:, :, i, j] += (key[:, j] * queries[distance]).sum(-1)
    found = positions.scores(query, key)
    torch.testing.assert_close(found, expected)
    leaves = [leaf for leaf, term in ((query, "c2p"), (keys, "c2p"), (key, "p2c"), (queries, "p2c"))
              if terms in ("both", term)]  # fmt: skip
    weights = torch.randn(found.shape, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), leaves), torch.autograd.grad((expected * weights).sum(), leaves)
    )


def test_recomputed_layers_and_a_resumed_step_drop_the_same():
    config = dataclasses.replace(RELATIVE, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    flat, found = concatenate(batch(config)), []
    for checkpointing in ("none", "all"):
        model = pretraining_model(config, gradient_checkpointing=checkpointing).train()
        for seed in (7, 7, 8):
            model.zero_grad()
            model(**flat, dropout_seed=seed).loss.backward()
            found.append(model.bert.relative.table.weight.grad.clone())
    assert all(torch.equal(found[0], found[place]) for place in (1, 3, 4)) and torch.equal(found[2], found[5])
    assert not torch.allclose(found[0], found[2])


def test_vectors_of_distances_are_dropped_apart_in_each_layer():
    config = dataclasses.replace(
        RELATIVE, hidden_dropout_prob=0.5, attention_output_dropout_prob=0.0, embedding_dropout=False
    )
    model, seen = pretraining_model(config).train(), []
    for layer in model.bert.encoder.layers:
        layer.attention.relative.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].rows == 0))
    flat = concatenate(batch(config))
    model(**flat, dropout_seed=3)
    assert len(seen) == 3 and all(0.4 < each.float().mean() < 0.6 for each in seen)
    assert not torch.equal(seen[0], seen[1])
    seen.clear()
    model.eval()(**flat)
    assert not any(each.any() for each in seen)


def test_flops_are_what_torch_counts_but_for_pairs_of_no_token_and_the_maps_of_distances():
    config = dataclasses.replace(
        TINY, relative_attention="both", vocab_padding_multiple=1, pooler=False, decoder_bias=False
    )
    flat = concatenate(batch(config, (48, 48)))
    model, width = pretraining_model(config), config.hidden_size
    with FlopCounterMode(display=False) as counter:
        model(**flat).loss.backward()
    expected = training_flops(config, TokenCounts.of_micro_batch(flat))
    expected -= unread_flops(config, 96, len(flat["labels"]) + 2)
    expected += 6 * 2 * 2 * width
    pairs, maps = 2 * 2 * 48 * 47 * width, 95 * width * 3 * width
    assert counter.get_total_flops() == expected + 6 * 3 * (pairs + maps)


def test_flash_attention_which_takes_no_bias_is_refused_and_not_chosen(monkeypatch):
    with pytest.raises(ModelError, match="varlen takes no bias, found relative_attention = both; use sdpa"):
        check_kernel("varlen", RELATIVE)
    monkeypatch.setattr("cloze.model.attention._has_flash", lambda device: True)

    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, None

        def dim(self):
            return 2

    assert select_kernel("auto", RELATIVE, OnGpu(), False) == "sdpa"
    assert select_kernel("auto", TINY, OnGpu(), False) == "varlen"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"position_embedding": "rotary"}, "relative_attention: needs position_embedding learned"),
        ({"num_key_value_heads": 3}, "relative_attention: needs num_key_value_heads: null"),
        ({"relative_buckets": 1}, "relative_buckets: must be at least 2, and half of them less than"),
        ({"relative_buckets": 40}, "relative_buckets: must be at least 2, and half of them less than"),
        ({"relative_distances": 0}, "relative_distances: found 0, expected 1 to 1048576"),
        ({"relative_attention": "p2p"}, "relative_attention: found 'p2p', expected one of none, c2p, p2c, both"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(fields, message):
    with pytest.raises(ModelError, match=message) as caught:
        BertConfig(**{"relative_attention": "both", "relative_distances": 20} | fields)
    assert "\n" not in str(caught.value)
