"""What of the GPU's code a machine without one can show: no questions to the device, varlen's arguments, the loss's
chunks. The rest is in test_cuda.py."""

import dataclasses
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cloze.model import attention, bert, heads
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig, ModelError
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

VARLEN_ATTN = varlen.varlen_attn  # which a test replaces
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
    """Fake tensors have shapes and no values: whoever needs one (.item(), .tolist(), nonzero) gets an error."""
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


def reference_varlen(*arguments, **options) -> torch.Tensor:
    """varlen_attn by its documentation, sequence by sequence; takes its arguments and no others."""
    given = inspect.signature(VARLEN_ATTN).bind(*arguments, **options)
    given.apply_defaults()
    given = given.arguments
    (left, right), offsets = given["window_size"], given["cu_seq_q"].tolist()
    pairs = list(itertools.pairwise(offsets))
    assert given["cu_seq_q"].dtype == torch.int32 and torch.equal(given["cu_seq_q"], given["cu_seq_k"])
    assert given["max_q"] == given["max_k"] >= max(end - start for start, end in pairs)
    parts = []
    for start, end in pairs:
        query, key, value = (given[name][start:end].transpose(0, 1) for name in ("query", "key", "value"))
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        distance = torch.arange(end - start)[None] - torch.arange(end - start)[:, None]
        hidden = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0))
        parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("fields", list(VARIANTS.values()), ids=list(VARIANTS))
def test_varlen_is_told_what_the_other_kernels_are_told(monkeypatch, fields):
    config = dataclasses.replace(TINY, **fields)
    flat, found = concatenate(batch()), []
    for kernel in ("eager", "varlen"):
        if kernel == "varlen":
            monkeypatch.setattr(varlen, "varlen_attn", reference_varlen)
            monkeypatch.setattr(bert, "select_kernel", lambda *_: "varlen")  # which there is on CUDA only
        net = pretraining_model(config, attention_kernel=kernel)
        loss = net(**flat).loss
        loss.backward()
        found.append((loss, [parameter.grad for parameter in net.parameters()]))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "sdpa"), ((8, 0), "varlen"), ((9, 0), "varlen")])
def test_gpus_before_ampere_have_no_flash_attention(monkeypatch, capability, expected):
    """T4 and V100, for which fp16 is: their kernel is torch's own choice among its others."""
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tokens = SimpleNamespace(is_cuda=True, dtype=torch.float16, dim=lambda: 2, device=torch.device("cuda:0"))
    assert attention.select_kernel("auto", TINY, tokens, False, False) == expected
    if expected == "sdpa":
        with pytest.raises(ModelError, match="Ampere or newer"):
            attention.select_kernel("varlen", TINY, tokens, False, False)
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
