"""The vocabulary projection: hand-written gradient, padding, chunks."""

import dataclasses

import pytest
import torch

from cloze.model import heads
from cloze.model.attention import concatenated_layout
from cloze.model.heads import VocabularyProjection, _ProjectedCrossEntropy
from cloze.pipeline import records
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

LABELS = torch.tensor([3, -100, 0, 12, 5, 12])


def test_labels_that_the_pipeline_leaves_out_have_no_loss():
    assert heads.NO_LABEL == records.NO_LABEL == torch.nn.CrossEntropyLoss().ignore_index


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 16 * 4, 1 << 24])
def test_gradcheck_of_the_projected_cross_entropy(monkeypatch, bias, chunk):
    monkeypatch.setitem(heads._CHUNK_ELEMENTS, False, chunk)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 5), (16, 5), (16,))
    )

    def losses(*inputs):
        return _ProjectedCrossEntropy.apply(*inputs, *([] if bias else [None]), LABELS, 13)[0]

    assert torch.autograd.gradcheck(losses, (hidden, weight, offset) if bias else (hidden, weight))


def test_gradcheck_of_padding_and_unpadding():
    offsets = torch.tensor([0, 2, 6, 7], dtype=torch.int32)
    layout = concatenated_layout(TINY, "eager", offsets, 4, 7, torch.float64, causal=False)
    tokens = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    padded = layout.pad(tokens)
    assert padded.shape == (3, 4, 3) and (padded[0, 2:] == 0).all() and torch.equal(padded[1], tokens[2:6])
    assert torch.equal(layout.unpad(padded), tokens)
    assert torch.autograd.gradcheck(layout.pad, (tokens,))
    rows = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.unpad, (rows,))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 65536.0])
def test_bf16_gradients_agree_with_autograd_at_any_scale_of_the_loss(scale):
    generator = torch.Generator().manual_seed(0)
    projection = VocabularyProjection(TINY).to(torch.bfloat16)
    with torch.no_grad():
        projection.weight.normal_(generator=generator).mul_(0.3)
    hidden = torch.randn(50, TINY.hidden_size, generator=generator).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, TINY.vocab_size, (50,), generator=generator)
    losses, _ = projection(hidden, labels)
    (losses.sum() * scale).backward()

    exact = hidden.detach().double().requires_grad_()
    weight = projection.weight.detach().double().requires_grad_()
    bias = projection.bias.detach().double().requires_grad_()
    scores = (exact @ weight.t() + bias)[:, : TINY.vocab_size]
    expected = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
    (expected.sum() * scale).backward()
    torch.testing.assert_close(losses.double(), expected, atol=0.03, rtol=0)
    for ours, theirs in ((hidden, exact), (projection.weight, weight), (projection.bias, bias)):
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.01  # bf16 rounds to 2^-9
    assert projection.bias.grad.sum().abs() < 0.05 * projection.bias.grad.abs().sum()  # softmax minus one-hot


def test_padding_of_the_vocabulary_is_out_of_the_softmax_and_gets_no_gradient():
    assert TINY.padded_vocab_size == 256
    model = pretraining_model()
    flat = concatenate(batch())
    expected = model(**flat).mlm_losses
    with torch.no_grad():
        model.masked_lm.decoder.bias[TINY.vocab_size :] = 1000.0  # would win any softmax that saw it
    output = model(**flat)
    torch.testing.assert_close(output.mlm_losses, expected)
    output.loss.backward()
    assert (model.masked_lm.decoder.weight.grad[TINY.vocab_size :] == 0).all()
    assert (model.masked_lm.decoder.bias.grad[TINY.vocab_size :] == 0).all()
    assert model(flat["input_ids"], sequence_offsets=flat["sequence_offsets"]).prediction_logits.shape == (
        len(flat["input_ids"]),
        TINY.vocab_size,
    )
    unpadded = dataclasses.replace(TINY, vocab_padding_multiple=1)
    assert pretraining_model(unpadded).masked_lm.decoder.weight.shape[0] == TINY.vocab_size


def test_a_tied_decoder_is_one_parameter_and_an_untied_one_is_not():
    model = pretraining_model()
    assert model.masked_lm.decoder.weight is model.bert.embeddings.word.weight
    model = pretraining_model(dataclasses.replace(TINY, tie_word_embeddings=False))
    assert model.masked_lm.decoder.weight is not model.bert.embeddings.word.weight
