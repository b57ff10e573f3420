"""Floating-point operations of a step."""

import dataclasses

import pytest
from torch.utils.flop_counter import FlopCounterMode

from cloze.model.config import BertConfig
from cloze.model.families import BY_TYPE
from cloze.model.flops import TokenCounts, training_flops, unread_flops
from tests.model.model_batches import batch, concatenate, pretraining_model
from tests.model.tiny_families import tiny


def test_flops_are_those_of_the_published_comparison():
    base, large = (
        BertConfig(vocab_size=30522),
        BertConfig(
            vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        ),
    )
    # GF a sequence of 128 with 20 predictions and of 512 with 80
    for config, short, long in ((base, 69.9, 301.4), (large, 240.6, 1020.5)):
        assert training_flops(config, TokenCounts.of_lengths([128], 20)) / 1e9 == pytest.approx(short, abs=0.1)
        assert training_flops(config, TokenCounts.of_lengths([512], 80)) / 1e9 == pytest.approx(long, abs=0.1)
    parts = (TokenCounts.of_lengths([128], 20), TokenCounts.of_lengths([512], 80))
    assert TokenCounts.of_lengths([128, 512], 100) == TokenCounts(640, 128**2 + 512**2, 100)
    assert training_flops(base, TokenCounts.of_lengths([128, 512], 100)) == sum(
        training_flops(base, part) for part in parts
    )


@pytest.mark.parametrize("kind", [kind for kind in BY_TYPE if kind != "deberta-v2"])  # of which test_relative.py is
def test_flops_are_what_torch_counts_of_a_step(kind):
    """Matrix products as they are dispatched, the pooler's and the pairs' aside; sequences fill their places, and local
    attention sees all.
    """
    config = tiny(kind, pooler=False, decoder_bias=False)  # whose gradient is a product too
    if config.local_attention_window:
        config = dataclasses.replace(config, local_attention_window=96)
    model, padded = pretraining_model(config), batch(config, (48, 48))
    flat = concatenate(padded)
    num_tokens, num_masked, num_pairs = len(flat["input_ids"]), len(flat["labels"]), 2
    with FlopCounterMode(display=False) as counter:
        model(**flat).loss.backward()
    counts = TokenCounts.of_micro_batch(flat)
    assert counts == TokenCounts(96, 2 * 48**2, num_masked)
    expected = training_flops(config, counts)
    expected -= unread_flops(config, num_tokens, num_masked + num_pairs)
    assert counter.get_total_flops() == expected + 6 * num_pairs * 2 * config.hidden_size
