"""Weights cast once a step give what autocast gives, bit for bit, and are never older than the weights."""

import dataclasses

import pytest
import torch

from cloze.model.weight_copies import WeightCopies
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

VARIANTS = {
    "bert": {},
    "untied": dict(tie_word_embeddings=False),
    "modern": dict(
        position_embedding="rotary",
        norm_position="pre",
        gated_feed_forward=True,
        linear_bias=False,
        first_attention_norm=False,
        normalization="rms_norm",
    ),
    "dropout": dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
}
MICRO_BATCHES = [
    concatenate(batch(seed=seed, lengths=lengths))
    for seed, lengths in enumerate([(3, 48, 17), (20, 20), (48, 9, 9, 30)])
]


def passes(model, micro_batches: list[dict] = MICRO_BATCHES) -> torch.Tensor:
    """Losses of several micro-batches, whose gradients are added up."""
    losses = []
    for seed, flat in enumerate(micro_batches):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**flat, dropout_seed=seed).loss)
        losses[-1].backward()
    return torch.stack(losses).detach()


def gradients(model) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return taken


def steps(model, copies, rate: float = 0.1) -> list[torch.Tensor]:
    """Losses, gradients and weights of three steps, between which the weights change in place and by loading."""
    seen = []
    for step in range(3):
        with copies:
            seen.append(passes(model))
            taken = gradients(model)
        seen += taken
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), taken, strict=True):
                parameter -= rate * gradient
        if step == 1:
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
    return seen + [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("checkpointing", ["none", "all"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_losses_gradients_and_weights_are_autocasts_bit_for_bit(variant, checkpointing):
    config = dataclasses.replace(TINY, **VARIANTS[variant])
    plain, ours = (pretraining_model(config, gradient_checkpointing=checkpointing).train() for _ in range(2))
    expected = steps(plain, torch.enable_grad())  # a context that changes nothing
    found = steps(ours, WeightCopies(ours, torch.bfloat16))
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == torch.float32 and torch.equal(left, right)


def test_compiled_layers_take_copies_without_compiling_anew():
    import torch._dynamo.utils as dynamo

    torch._dynamo.reset()
    dynamo.counters.clear()
    plain, compiled = (pretraining_model(TINY, attention_kernel="sdpa") for _ in range(2))  # the eager one has 8 graphs
    compiled.bert.encoder.compile_layers(backend="aot_eager")
    copies, graphs = WeightCopies(compiled, torch.bfloat16), []
    same = MICRO_BATCHES[:1] * 2  # lengths of other kinds have graphs of their own
    for _ in range(3):
        with copies:
            ours = passes(compiled, same)
        torch.testing.assert_close(ours, passes(plain, same), rtol=1e-2, atol=0)
        torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=0.05, atol=1e-3)
        graphs.append(dynamo.counters["stats"]["unique_graphs"])
    assert graphs == [2] * 3, graphs


def test_parameters_are_parameters_in_16_bits_in_the_passes_and_in_fp32_outside():
    model = pretraining_model(TINY)
    layer, dtypes = model.bert.encoder.layers[0], []
    layer.feed_forward.up.register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
    before = dict(model.named_parameters())
    with WeightCopies(model, torch.bfloat16):
        passes(model)
    passes(model)
    assert dtypes == 3 * [torch.bfloat16] + 3 * [torch.float32]
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_pass_that_fails_leaves_the_parameters_in_place():
    model = pretraining_model(TINY)
    before = dict(model.named_parameters())
    with pytest.raises(TypeError), WeightCopies(model, torch.bfloat16):
        model.bert.encoder.layers[0](None, None, None)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.bert.encoder.layers[0]._copies is None


def test_a_frozen_weight_gets_no_gradient():
    model = pretraining_model(TINY)
    frozen = model.bert.encoder.layers[1].feed_forward.up.weight.requires_grad_(False)
    with WeightCopies(model, torch.bfloat16):
        passes(model)
    assert frozen.grad is None and model.bert.encoder.layers[1].feed_forward.down.weight.grad is not None
