"""What of the GPU's code a machine without one can show: no questions to the device, varlen's arguments, the loss's
chunks. The rest is in test_cuda.py."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cloze.model import heads
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model

VARIANTS = {
    "bert": {},
    "pre-LN without pooler": dict(norm_position="pre", pooler=False),
    "local and rotary": dict(position_embedding="rotary", local_attention_window=8),
    "grouped queries": dict(num_key_value_heads=2),
    "grouped queries, rotary": dict(num_key_value_heads=1, position_embedding="rotary"),
    "disentangled": dict(relative_attention="both", relative_buckets=8, relative_norm=True, relative_projections=True),
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
