"""What only a CUDA device can show: the kernels there, no waiting for the device, compiled layers in 16 bits."""

import dataclasses

import pytest
import torch

from cloze.model.heads import VocabularyProjection
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256)  # flash attention wants heads of 8, 16, 32 ...
VARIANTS = {
    "bert": {},
    "decoder": dict(is_decoder=True),
    "local and rotary": dict(position_embedding="rotary", local_attention_window=8, norm_position="pre"),
}


def on_device(flat: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in flat.items()}


def gradient_of(model: torch.nn.Module, flat: dict, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and all gradients in one fp32 vector on the host."""
    model.zero_grad()
    loss = model(**flat, **arguments).loss
    loss.backward()
    return loss.float().cpu(), torch.cat([each.grad.float().flatten() for each in model.parameters()]).cpu()


@pytest.mark.parametrize("kernel", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_kernels_agree_with_fp32_on_the_host(kernel, variant):
    config = dataclasses.replace(WIDE, **VARIANTS[variant])
    flat = concatenate(batch())
    loss, gradient = gradient_of(pretraining_model(config), flat)
    model = pretraining_model(config, attention_kernel=kernel).to("cuda", torch.bfloat16)
    ours, our_gradient = gradient_of(model, on_device(flat))
    assert abs(ours - loss) < 0.03 * loss
    assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_of_the_loss_is_not_rounded_to_16_bits(dtype):
    """What all elements share shows in norms: either scale, rounded to its dtype, would be 2.6 tolerances off."""
    projection = VocabularyProjection(WIDE).to("cuda", dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        projection.weight.normal_(generator=generator).mul_(0.1)
    hidden = torch.randn(500, WIDE.hidden_size, device="cuda", generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, WIDE.vocab_size, (500,), device="cuda", generator=generator)
    parts = hidden, projection.weight, projection.bias
    norms = []
    for scale in (1.0, 3 + (2**-7 if dtype == torch.bfloat16 else 2**-10)):  # halfway between two numbers of the dtype
        losses, _ = projection(hidden, labels)
        gradients = torch.autograd.grad(losses.sum() * scale, parts)
        norms.append(torch.stack([each.double().norm() for each in gradients]))
    torch.testing.assert_close(norms[1], norms[0] * scale, rtol=1e-3 if dtype == torch.bfloat16 else 1.25e-4, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_never_waits_for_the_device(dropout):
    config = dataclasses.replace(WIDE, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = pretraining_model(config).to("cuda", torch.bfloat16)
    flat = on_device(concatenate(batch()))
    gradient_of(model, flat)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = model(**flat, dropout_seed=1)
        (output.mlm_losses.sum() + output.next_sentence_losses.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_and_recomputed_layers_leave_gradients_near(dropout):
    config = dataclasses.replace(WIDE, hidden_dropout_prob=dropout)
    plain = pretraining_model(config).to("cuda", torch.bfloat16)
    compiled = pretraining_model(config, gradient_checkpointing="every_2").to("cuda", torch.bfloat16)
    compiled.bert.encoder.compile_layers()
    for lengths in ((3, 48, 17), (20, 20), (48, 9, 9, 30)):
        flat = on_device(concatenate(batch(lengths=lengths)))
        loss, gradient = gradient_of(plain, flat, dropout_seed=2)
        ours, our_gradient = gradient_of(compiled, flat, dropout_seed=2)
        assert abs(ours - loss) < 0.02 * loss
        assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.99
