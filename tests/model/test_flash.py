"""Flash attention, with a stand-in for its kernels."""

import dataclasses
import itertools
import logging
import logging.handlers

import pytest
import torch

from cloze.model import bert
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model
from tests.model.test_gpu_paths import VARIANTS


def sequences(offsets, longest, probability, causal, state, left, right, *tensors):
    """Each sequence's part of tensors (T, heads, size), as (heads, S, size); what is hidden (S, S); the mask of kept
    probabilities, scaled (heads, S, S)."""
    generator, pairs = torch.Generator().manual_seed(int(state[0])), list(itertools.pairwise(offsets.tolist()))
    assert offsets.dtype == torch.int32 and longest >= max(end - start for start, end in pairs)
    for start, end in pairs:
        distance = torch.arange(end - start)[None] - torch.arange(end - start)[:, None]
        hidden = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0)) | ((distance > 0) & causal)
        kept = torch.rand(tensors[0].shape[1], *distance.shape, generator=generator) >= probability
        yield *(each[start:end].transpose(0, 1) for each in tensors), hidden, kept / (1 - probability)


def reference_flash(
    query,
    key,
    value,
    offsets,
    other_offsets,
    longest,
    other_longest,
    probability,
    causal,
    *_,
    window_size_left=-1,
    window_size_right=-1,
):
    """aten._flash_attention_forward by its documentation, sequence by sequence. What is dropped hangs on a state, drawn
    from the default generator as there. Keys and values may have fewer heads."""
    assert torch.equal(offsets, other_offsets) and longest == other_longest
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    state, parts, empty = torch.randint(1 << 62, (2,)), [], query.new_empty(0)
    for q, k, v, hidden, kept in sequences(
        offsets, longest, probability, causal, state, window_size_left, window_size_right, query, key, value
    ):
        shares = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append((shares * kept @ v).transpose(0, 1))
    return torch.cat(parts), query.new_zeros(query.shape[1::-1]).float(), state.to(torch.uint64), empty, empty.clone()


def reference_flash_backward(
    gradient,
    query,
    key,
    value,
    output,
    sums,
    offsets,
    other_offsets,
    longest,
    other_longest,
    probability,
    causal,
    state,
    unused,
    *,
    window_size_left=-1,
    window_size_right=-1,
    **_,
):
    """aten._flash_attention_backward: the mask drawn again from the forward's state."""
    gradients, scale, heads = [], query.shape[-1] ** -0.5, key.shape[1]
    key, value = (each.repeat_interleave(query.shape[1] // heads, 1) for each in (key, value))
    for g, q, k, v, hidden, kept in sequences(
        offsets,
        longest,
        probability,
        causal,
        state.to(torch.int64),
        window_size_left,
        window_size_right,
        gradient,
        query,
        key,
        value,
    ):
        shares = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        to_shares = (g @ v.transpose(1, 2)) * kept
        to_scores = shares * (to_shares - (to_shares * shares).sum(-1, keepdim=True)) * scale
        gradients.append([to_scores @ k, to_scores.transpose(1, 2) @ q, (shares * kept).transpose(1, 2) @ g])
    to_query, *others = (torch.cat([each.transpose(0, 1) for each in parts]) for parts in zip(*gradients, strict=True))
    return to_query, *(each.unflatten(1, (heads, -1)).sum(2) for each in others)


@pytest.fixture
def flash(monkeypatch):
    """Flash attention on the host, in place of torch's for CUDA; every kernel is varlen."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", reference_flash, "CPU")
    library.impl("_flash_attention_backward", reference_flash_backward, "CPU")
    monkeypatch.setattr(bert, "select_kernel", lambda name, *_: "varlen" if name == "auto" else name)
    yield
    library._destroy()


def loss_and_gradients(net, flat: dict, **options) -> list[torch.Tensor]:
    net.zero_grad()
    loss = net(**flat, **options).loss
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in net.parameters()]]


# Disentangled attention adds to the scores what the kernel does not take: it is refused.
FLAT = {name: fields for name, fields in VARIANTS.items() if not fields.get("relative_attention")}


@pytest.mark.parametrize("fields", list(FLAT.values()), ids=list(FLAT))
def test_varlen_gets_the_arguments_of_the_other_kernels(flash, fields):
    config = dataclasses.replace(TINY, **fields)
    flat = concatenate(batch())
    eager, varlen = (
        loss_and_gradients(pretraining_model(config, attention_kernel=kernel), flat) for kernel in ("eager", "auto")
    )
    torch.testing.assert_close(varlen, eager, atol=1e-5, rtol=0)


DROPPING = dataclasses.replace(TINY, attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.1)


def test_flash_attention_drops_by_the_key_of_the_forward_alone(flash):
    net, flat = pretraining_model(DROPPING).train(), concatenate(batch())
    torch.manual_seed(1)
    first = loss_and_gradients(net, flat, dropout_seed=5)
    stands = torch.get_rng_state()
    torch.rand(3)  # whatever was drawn before
    again, other = loss_and_gradients(net, flat, dropout_seed=5), loss_and_gradients(net, flat, dropout_seed=6)
    assert all(torch.equal(left, right) for left, right in zip(again, first, strict=True))
    assert not torch.equal(other[0], first[0])
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), stands), "the default generator moved"
    undropped = dataclasses.replace(DROPPING, attention_probs_dropout_prob=0.0)
    assert not torch.equal(loss_and_gradients(pretraining_model(undropped).train(), flat, dropout_seed=5)[0], first[0])


def test_flash_attention_drops_the_same_when_recomputed(flash):
    flat = concatenate(batch())
    kept, recomputed = (
        loss_and_gradients(
            pretraining_model(DROPPING, gradient_checkpointing=checkpointing).train(), flat, dropout_seed=5
        )
        for checkpointing in ("none", "all")
    )
    assert all(torch.equal(left, right) for left, right in zip(recomputed, kept, strict=True))


# As ModernBERT: of its layers the first has no norm, every second sees all tokens, the last reads some of them. And as
# EuroBERT: two heads share keys and values.
MODERN = dataclasses.replace(
    DROPPING,
    num_key_value_heads=2,
    position_embedding="rotary",
    normalization="rms_norm",
    norm_position="pre",
    first_attention_norm=False,
    gated_feed_forward=True,
    linear_bias=False,
    local_attention_window=8,
    global_attention_every=2,
    pooler=False,
)


@pytest.mark.parametrize(
    ("config", "expected_graphs"),
    [(DROPPING, 2), (MODERN, 3)],
    ids=["bert", "modernbert"],
)
def test_compiled_layers_drop_the_same_in_flash_attention_and_never_compile_anew(
    flash, config, expected_graphs, monkeypatch
):
    """Whatever the key, the lengths and the number of sequences."""
    import torch._dynamo.utils as dynamo

    torch._dynamo.reset()
    torch._logging.warning_once.cache_clear()
    dynamo.counters.clear()
    plain, compiled = pretraining_model(config).train(), pretraining_model(config).train()
    compiled.bert.encoder.compile_layers(backend="aot_eager")
    told, graphs = logging.handlers.BufferingHandler(1000), []
    monkeypatch.setattr(logging.getLogger("torch._higher_order_ops.wrap"), "handlers", [told])
    for seed, lengths in enumerate([(3, 48, 17), (9, 30), (48, 9, 9, 30), (5, 6, 7, 40, 41)]):
        flat = concatenate(batch(lengths=lengths, seed=seed))
        key = (1 << 61) * seed + seed  # the trainer's have 63 bits
        ours, expected = (loss_and_gradients(net, flat, dropout_seed=key) for net in (compiled, plain))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        graphs.append(dynamo.counters["stats"]["unique_graphs"])
    assert graphs == [expected_graphs] * 4 and not dynamo.counters["graph_break"], dynamo.counters["graph_break"]
    assert not told.buffer, "torch says nothing of its own that users could not act on"
