"""The convolution beside the first layer; its values are those of transformers by families/test_deberta.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cloze.model.config import BertConfig, ModelError
from cloze.model.flops import TokenCounts, training_flops, unread_flops
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

CONVOLVING = dataclasses.replace(TINY, convolution_size=5, vocab_padding_multiple=1, pooler=False, decoder_bias=False)


def test_recomputed_layers_and_a_resumed_step_drop_the_same():
    config = dataclasses.replace(CONVOLVING, hidden_dropout_prob=0.3)
    flat, found = concatenate(batch(config)), []
    for checkpointing in ("none", "all"):
        model = pretraining_model(config, gradient_checkpointing=checkpointing)
        for seed in (7, 7, 8):
            model.zero_grad()
            model(**flat, dropout_seed=seed).loss.backward()
            found.append(model.bert.encoder.layers[0].convolution.map.weight.grad.clone())
    assert all(torch.equal(found[0], found[place]) for place in (1, 3, 4)) and torch.equal(found[2], found[5])
    assert not torch.allclose(found[0], found[2])


def test_what_is_convolved_is_dropped_before_its_activation():
    config = dataclasses.replace(
        CONVOLVING, hidden_dropout_prob=0.5, attention_output_dropout_prob=0.0, embedding_dropout=False
    )
    model, seen = pretraining_model(config), []
    convolution = model.bert.encoder.layers[0].convolution
    convolution.activation = lambda hidden: seen.append(hidden == 0) or hidden.tanh()
    flat = concatenate(batch(config))
    model(**flat, dropout_seed=3)
    model.eval()(**flat)
    assert 0.4 < seen[0].float().mean() < 0.6 and not seen[1].any()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_tokens_that_are_read_of_a_single_layer_are_those_of_all(precision):
    model = pretraining_model(dataclasses.replace(CONVOLVING, num_hidden_layers=1)).eval().to(precision)
    flat = concatenate(batch(CONVOLVING))
    positions, _, _ = (flat.pop(name) for name in ("masked_positions", "labels", "next_sentence_label"))
    with torch.no_grad():
        whole = model.bert(**flat).last_hidden_state
        read = model.bert(**flat, read_tokens=positions).last_hidden_state
        torch.testing.assert_close(read, whole[positions])
        with torch.autocast("cpu", torch.bfloat16):  # the residual stream keeps its 16 bits
            states = model.bert(**flat, output_hidden_states=True).hidden_states
        assert len({state.dtype for state in states}) == 1


def test_flops_are_what_torch_counts():
    """The row has a few more tokens: the zeros between sequences."""
    flat = concatenate(batch(CONVOLVING, (48, 48)))
    model, width, gap = pretraining_model(CONVOLVING), CONVOLVING.hidden_size, 2
    with FlopCounterMode(display=False) as counter:
        model(**flat).loss.backward()
    expected = training_flops(CONVOLVING, TokenCounts.of_micro_batch(flat))
    expected -= unread_flops(CONVOLVING, 96, len(flat["labels"]) + 2)
    expected += 6 * 2 * 2 * width + 6 * gap * 5 * width * width
    assert counter.get_total_flops() == expected


def test_what_a_convolution_would_leak_is_refused_in_one_line():
    model, padded = pretraining_model(CONVOLVING).eval(), batch(CONVOLVING)
    for inputs, message in (
        ({"causal": True}, "causal attention: found with model.convolution_size 5, which sees tokens on both sides"),
        ({"attention_mask": torch.ones(5, 48, 48)}, r"attention_mask \(B, S, S\): found with model.convolution_size 5"),
    ):
        with pytest.raises(ModelError, match=message):
            model.bert(padded["input_ids"], **inputs)
    for fields, message in (
        ({"convolution_size": 2}, "convolution_size: must be 0 or odd"),
        ({"norm_position": "pre"}, "convolution_size: needs norm_position: post, is_decoder: false"),
        ({"is_decoder": True}, "convolution_size: needs norm_position: post, is_decoder: false"),
        ({"num_layer_groups": 1}, "convolution_size: needs norm_position: post, is_decoder: false"),
        ({"convolution_act": "mish"}, "convolution_act: found 'mish', expected one of tanh, gelu"),
    ):
        with pytest.raises(ModelError, match=message):
            BertConfig(**{"convolution_size": 3} | fields)
