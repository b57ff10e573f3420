"""Rows that a CPU with AMX adds to a batch: few row counts, the same outputs and gradients."""

import dataclasses
import itertools

import pytest
import torch

from cloze.model import amx
from tests.model.model_batches import TINY, TOLERANCE, batch, concatenate, pretraining_model

LENGTHS = [(3, 48, 17, 9, 30), (48, 47, 45, 44, 9, 9)]


def test_row_counts_are_few_and_little_larger(monkeypatch):
    monkeypatch.setitem(amx._SIZES_PER_OCTAVE, False, 16)
    rounded = [count + amx.extra_rows(count, False) for count in range(10_000)]
    assert rounded[:33] == list(range(33))
    assert len(set(rounded[1 << 9 : 1 << 13])) == 4 * 16 + 1
    assert all(count <= larger <= count * 17 / 16 for count, larger in enumerate(rounded))
    assert not any(amx.extra_rows(count, True) for count in range(10_000))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(position_embedding="rotary", norm_position="pre", local_attention_window=8),
        dict(attention_probs_dropout_prob=0.1, is_decoder=True),
    ],
    ids=["bert", "rotary", "dropout"],
)
def test_rows_beyond_the_tokens_change_nothing(kernel, fields, monkeypatch):
    """Row counts rounded up to powers of two, as on a CPU with AMX to closer sizes: outputs and gradients stay."""
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.1, **fields)
    for whole, lengths in itertools.product((False, True), LENGTHS):
        flat, found, counted = concatenate(batch(lengths=lengths)), [], []
        for sizes in (None, 1):
            monkeypatch.setitem(amx._SIZES_PER_OCTAVE, False, sizes)
            model, rows = pretraining_model(config, attention_kernel=kernel), []
            for layer in model.bert.encoder.layers:
                layer.feed_forward.register_forward_hook(
                    lambda module, inputs, output, rows=rows: rows.append(len(output[0]))
                )
            model.train(not config.attention_probs_dropout_prob)  # its masks depend on the groups of sequences
            inputs = (
                flat
                if not whole
                else {name: each for name, each in flat.items() if name not in ("masked_positions", "labels")}
                | {
                    "labels": torch.full_like(flat["input_ids"], -100).index_copy(
                        0, flat["masked_positions"], flat["labels"]
                    )
                }
            )
            output = model(**inputs, dropout_seed=3)
            output.loss.backward()
            found.append((output, {name: each.grad for name, each in model.named_parameters()}))
            counted.append(rows)
        assert counted[1] != counted[0] and all(count & count - 1 == 0 for count in counted[1][:-1])
        for name in ("mlm_losses", "next_sentence_losses"):
            torch.testing.assert_close(getattr(found[0][0], name), getattr(found[1][0], name), **TOLERANCE)
        assert torch.equal(found[0][0].mlm_correct, found[1][0].mlm_correct)
        for name, gradient in found[0][1].items():
            if gradient is None:
                assert found[1][1][name] is None
            else:
                torch.testing.assert_close(found[1][1][name], gradient, **TOLERANCE)
