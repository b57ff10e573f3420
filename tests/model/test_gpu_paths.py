"""What of the GPU's code a machine without one can show: no questions to the device, varlen's arguments, the loss's
chunks. The rest is in test_cuda.py."""

import dataclasses
import itertools
import logging
import logging.handlers
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cloze.model import attention, bert, heads
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig, ModelError
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

VARIANTS = {
    "bert": {},
    "pre-LN without pooler": dict(norm_position="pre", pooler=False),
    "local and rotary": dict(position_embedding="rotary", local_attention_window=8),
    "decoder": dict(is_decoder=True),
    "local decoder": dict(is_decoder=True, local_attention_window=8),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", ["none", "all"])
@pytest.mark.parametrize("fields", list(VARIANTS.values()), ids=list(VARIANTS))
def test_no_value_of_a_tensor_is_asked_for_in_a_step(fields, checkpointing, dropout):
    """Fake tensors have shapes and no values: code that needs one (.item(), .tolist(), nonzero) gets an error."""
    config = dataclasses.replace(TINY, hidden_dropout_prob=dropout, **fields)
    flat = concatenate(batch())
    with FakeTensorMode():
        net = BertForPreTraining(config, attention_kernel="sdpa", gradient_checkpointing=checkpointing)
        inputs = {
            name: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in flat.items()
        }
        output = net(**inputs, dropout_seed=1)
        loss = output.mlm_losses.sum() / output.num_masked + output.next_sentence_losses.sum()
        loss.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        with pytest.raises(Exception, match="_local_scalar_dense"):  # that fakes do refuse
            loss.item()


class OnCuda(TorchFunctionMode):
    """Tensors say that they are on CUDA."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        return function == torch.Tensor.is_cuda.__get__ or function(*arguments, **(options or {}))


class NoRoundedFactors(TorchDispatchMode):
    """Refuses products in 16 bits with a factor of more, which CUDA would round, for all elements alike."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_):
            dtypes = {each.dtype for each in arguments if isinstance(each, torch.Tensor)}
            assert len(dtypes) == 1 or torch.result_type(*arguments).itemsize > 2, dtypes
        return function(*arguments, **(options or {}))


def test_the_scale_of_the_loss_is_not_rounded_to_16_bits():
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((6, 8), (16, 8), (16,))]
    losses, _ = heads._ProjectedCrossEntropy.apply(*inputs, torch.arange(6), 13)
    expected = torch.autograd.grad(losses.sum() * 0.3, inputs, retain_graph=True)
    with OnCuda(), NoRoundedFactors():
        found = losses.grad_fn.apply(torch.full((6,), 0.3), None)
    for ours, theirs in zip(found, expected, strict=False):
        assert torch.equal(ours, theirs)


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
    from the default generator as there."""
    assert torch.equal(offsets, other_offsets) and longest == other_longest
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
    gradients, scale = [], query.shape[-1] ** -0.5
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
    return tuple(torch.cat([each.transpose(0, 1) for each in parts]) for parts in zip(*gradients, strict=True))


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


@pytest.mark.parametrize("fields", list(VARIANTS.values()), ids=list(VARIANTS))
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


# As ModernBERT: of its layers the first has no norm, every third sees all tokens, the last reads some of them.
MODERN = dataclasses.replace(
    DROPPING,
    num_hidden_layers=5,
    position_embedding="rotary",
    norm_position="pre",
    first_attention_norm=False,
    gated_feed_forward=True,
    local_attention_window=8,
    pooler=False,
)


@pytest.mark.parametrize(("config", "expected_graphs"), [(DROPPING, 2), (MODERN, 4)], ids=["bert", "modernbert"])
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


class OperatorNames(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


def test_compiled_layers_keep_a_number_a_token_for_backward_and_no_mask():
    """Backward hashes again: torch's partitioner, as before Inductor, finds that to be less to keep."""
    saved: list[list] = []
    flat = concatenate(batch())
    for probability in (0.0, 0.1):
        config = dataclasses.replace(TINY, hidden_dropout_prob=probability, embedding_dropout=False)
        net = pretraining_model(config, attention_kernel="sdpa").train()
        net.bert.encoder.compile_layers(backend="aot_eager_decomp_partition")
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved[-1].append(tensor) or tensor, lambda tensor: tensor
        ):
            loss = net(**flat, dropout_seed=1).loss
        with OperatorNames() as names:
            loss.backward()
        assert "addcmul" not in names.seen, "residuals are added and dropped anew in backward"
    plain, dropping = (
        [tuple(tensor.shape) for tensor in tensors if tensor.dtype in (torch.int32, torch.bool)] for tensors in saved
    )
    assert not plain and len(dropping) == 2 * TINY.num_hidden_layers
    assert all(columns == 1 for _, columns in dropping)
    assert sum(tensor.is_floating_point() for tensor in saved[0]) == sum(
        tensor.is_floating_point() for tensor in saved[1]
    )


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "sdpa"), ((8, 0), "varlen"), ((9, 0), "varlen")])
def test_gpus_before_ampere_have_no_flash_attention(monkeypatch, capability, expected):
    """T4 and V100, for which fp16 is: their kernel is torch's own choice among its others."""
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tokens = SimpleNamespace(is_cuda=True, dtype=torch.float16, dim=lambda: 2, device=torch.device("cuda:0"))
    assert attention.select_kernel("auto", TINY, tokens, False) == expected
    if expected == "sdpa":
        with pytest.raises(ModelError, match="Ampere or newer"):
            attention.select_kernel("varlen", TINY, tokens, False)
    attention._has_flash.cache_clear()


class LargestFloats(TorchDispatchMode):
    """The most elements of an fp32 tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                self.largest = max(self.largest, each.numel())
        return result


def test_logits_of_masked_tokens_exist_once_in_16_bits_and_in_fp32_by_chunks_only(monkeypatch):
    masked, vocabulary, width, chunk = 512, 1024, 32, 16
    monkeypatch.setattr(heads, "_CHUNK_ELEMENTS", {False: chunk * vocabulary, True: chunk * vocabulary})
    config = BertConfig(vocab_size=vocabulary, hidden_size=width, num_attention_heads=1)
    projection = heads.VocabularyProjection(config).to(torch.bfloat16)
    hidden = torch.randn(masked, width, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (masked,))
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with LargestFloats() as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses, _ = projection(hidden, labels)
        losses.sum().backward()
    assert counter.largest <= max(chunk * vocabulary, vocabulary * width)  # a chunk, or a gradient of the weights
    logits = masked * vocabulary * 2
    assert logits <= sum(saved.values()) < 1.2 * logits
