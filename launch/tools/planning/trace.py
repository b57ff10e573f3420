"""The kernels and the memory of a step, traced from the run's own code on fake tensors.

The model and the optimizer run under torch's FakeTensorMode: every operation is dispatched but not computed, so that
BERT-large at any batch takes seconds and hardly any memory. The fake tensors are on the CPU; `_as_on_gpu` patches the
places where the model would act differently on a GPU. Autocast casts the same operations on both.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cloze.launch.engine.optimizers.muon import MuonWithAdamW
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.training.objective import ModelOutput
from cloze.model import amx, attention, bert, dropout, embeddings, heads, sampling
from cloze.model.bert import BertForPreTraining, BertPreTrained
from cloze.model.config import BertConfig
from cloze.model.encoder import EncoderLayer
from cloze.model.flops import TokenCounts
from cloze.model.weight_copies import WeightCopies
from cloze.pipeline.fields import Fields, MicroBatch

# Operations without a kernel: allocation, and queries of tensors.
_SILENT = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "device",
    "sym_size",
    "sym_numel",
    "sym_stride",
    "is_same_size",
    "scalar_tensor",
    "set_",
    "lift",
    "_record_function_enter_new",
    "_record_function_exit",
}
# Matrix products by the place of their factors among the tensors that they take.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
# Convolutions by the place of their weights, and the products that they are made of.
_CONVOLUTIONS = {"convolution": (1, 1), "convolution_backward": (2, 2)}


@dataclass(frozen=True)
class Kernel:
    """One operation on the device."""

    name: str
    """ATen's name of it."""
    kind: str
    """product, attention, attention_backward, pointwise (which fuses with its like), other."""
    shape: tuple[int, ...] = ()
    """Shape of a product: batch, rows, inner length, columns."""
    flops: float = 0.0
    reads: tuple[tuple[int, int], ...] = ()
    """Number of each storage read, and bytes of it."""
    writes: tuple[tuple[int, int], ...] = ()
    tensors: int = 1
    """Number of tensors of an operation on lists."""
    elements: int = 0
    """Elements of the largest tensor that it takes or makes; for lists, of one list."""
    in_layer: bool = False
    """Whether an encoder layer does it, forward or backward: what `train.compile` compiles."""

    @property
    def bytes(self) -> int:
        """Bytes moved from and to the device's memory."""
        return sum(size for _, size in self.reads) + sum(size for _, size in self.writes)


@dataclass
class Trace:
    """The recorded kernels and memory of some code."""

    kernels: list[Kernel] = field(default_factory=list)
    once: list[Kernel] = field(default_factory=list)
    """Kernels that a step runs once, however many micro-steps it has: copies of weights."""
    forward: int = 0
    """How many of `kernels`, the first ones, are forward's."""
    peak_bytes: int = 0
    """The most that tensors made in it have held at once."""


class _Recorder(TorchDispatchMode):
    """Records dispatched operations."""

    def __init__(self, attention_flops: Callable[[str, Sequence[Tensor]], float]) -> None:
        super().__init__()
        self.trace = Trace()
        self.in_layer = False
        self._attention_flops = attention_flops
        self._numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._held = 0
        self._count = 0

    def _number(self, tensor: Tensor, is_new: bool) -> int:
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._count += 1
            self._numbers[storage] = self._count
            if is_new:
                size = storage.nbytes()
                self._held += size
                self.trace.peak_bytes = max(self.trace.peak_bytes, self._held)
                weakref.finalize(storage, self._free, size)
        return self._numbers[storage]

    def _free(self, size: int) -> None:
        self._held -= size

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Fields | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        taken = [leaf for leaf in tree_leaves((args, read)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        reads = self._reads(name, taken, results)
        aliases = [each.alias_info for each in function._schema.returns if each.alias_info is not None]
        if any(not alias.is_write for alias in aliases):
            return result  # a view
        writes = tuple((self._number(tensor, True), _bytes(tensor)) for tensor in results)
        if not writes:  # in place, on lists
            writes = tuple((self._number(tensor, False), _bytes(tensor)) for tensor in _written(function, args))
        if name in _INTO_PLACES:  # only those are read and written
            size = min(_bytes(tensor) for tensor in taken)
            reads, writes = (*((number, min(size, each)) for number, each in reads),), ((writes[0][0], size),)
        if name in _SILENT or not (reads or writes):
            return result
        kind, shape, flops = self._work(name, taken)
        tensors = max((len(argument) for argument in args if isinstance(argument, (list, tuple))), default=1)
        elements = (
            sum(tensor.numel() for tensor in taken[:tensors])
            if tensors > 1
            else max(tensor.numel() for tensor in [*taken, *results])
        )
        self.trace.kernels.append(
            Kernel(name, kind, shape, flops, reads, writes, max(1, tensors), elements, self.in_layer)
        )
        return result

    def _reads(self, name: str, taken: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
        """Number of each storage that is read, and the bytes: of a table the rows that are taken."""
        reads = [(self._number(tensor, False), _bytes(tensor)) for tensor in taken]
        if name in _FROM_PLACES:
            reads[0] = reads[0][0], min(reads[0][1], _bytes(results[0]))
        return tuple(reads[1:] if name in _OVERWRITING else reads)

    def once_a_size(self, work: Callable[..., None]) -> Callable[..., None]:
        """`work`, which changes some rows of tensors in place, by their start and count: what a first call was is
        written down for those that follow with as many rows. Of many tokens to predict there are hundreds of chunks.
        """
        known: dict[object, tuple[list[Kernel], int]] = {}  # and the bytes that are held at most meanwhile

        def recorded(start: int, count: int, *args: Any) -> None:
            size = count, *((each.shape, each.dtype) if isinstance(each, Tensor) else each for each in args)
            trace, held = self.trace, self._held
            if size in known:
                kernels, most = known[size]
                trace.kernels += kernels
                trace.peak_bytes = max(trace.peak_bytes, held + most)
                return
            before, peak, trace.peak_bytes = len(trace.kernels), trace.peak_bytes, held
            work(start, count, *args)
            known[size] = trace.kernels[before:], trace.peak_bytes - held
            trace.peak_bytes = max(peak, trace.peak_bytes)

        return recorded

    def follow(self, layer: nn.Module) -> None:
        """Mark the kernels of a layer with the layer."""

        def enter(*_: object) -> None:
            self.in_layer = True

        def leave(*_: object) -> None:
            self.in_layer = False

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
        layer.register_full_backward_pre_hook(enter)
        layer.register_full_backward_hook(leave)

    def _work(self, name: str, taken: Sequence[Tensor]) -> tuple[str, tuple[int, ...], float]:
        if name in _PRODUCTS:
            first, second = (taken[place].shape for place in _PRODUCTS[name])
            shape = (math.prod(first[:-2]), first[-2], first[-1], second[-1])
            return "product", shape, 2.0 * math.prod(shape)
        if name in _CONVOLUTIONS:
            place, products = _CONVOLUTIONS[name]
            rows, weight = taken[0].shape, taken[place].shape
            shape = (1, rows[0] * math.prod(rows[2:]), math.prod(weight[1:]), weight[0])
            return "product", shape, products * 2.0 * math.prod(shape)
        if "attention" in name or "attn" in name:
            kind = "attention_backward" if "backward" in name else "attention"
            return kind, (), self._attention_flops(kind, taken)
        fuses = name not in _APART and not name.startswith(("_foreach", "_fused"))
        return "pointwise" if fuses else "other", (), 0.0


# Operations that read some places of their first tensor, that change some in place, and that use its shape alone.
_FROM_PLACES = {"embedding", "gather", "index", "index_select"}
_INTO_PLACES = {"scatter_add_"}
_OVERWRITING = {"copy_", "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
# Kernels of their own also in compiled code: they move rows, draw, are sums that a table is, or (sum) sums over all
# tokens, as a bias's gradient is: Inductor reads again for them what another kernel has written.
_APART = {
    "embedding",
    "embedding_dense_backward",
    "index_select",
    "index_put",
    "index_add",
    "index",
    "gather",
    "scatter_add_",
    "random_",
    "searchsorted",
    "_efficientzerotensor",
    "copy_",
    "sum",
}


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes; an expanded tensor is in memory once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _written(function: OpOverload, args: tuple[Any, ...]) -> list[Tensor]:
    return [
        leaf
        for argument, value in zip(function._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


# Rows and columns of scores that flash attention computes at a time (flash_fwd_launch_template.h, heads of 64): what a
# window or a short sequence leaves of such a tile is computed all the same.
_TILE = 128


def _scores_seen(config: BertConfig, lengths: Sequence[int]) -> float:
    """Scores of one head that attention computes, of the mean layer, in whole tiles."""
    rounded = [-(-length // _TILE) * _TILE for length in lengths]
    total = 0.0
    for layer in range(config.num_hidden_layers):
        reach = config.local_attention_window + _TILE if config.attends_locally(layer) else math.inf
        total += sum(length * min(length, reach) for length in rounded)
    return total / config.num_hidden_layers


def _attention_flops(config: BertConfig, lengths: Sequence[int]) -> Callable[[str, Sequence[Tensor]], float]:
    """FLOPs of one call: two products forward, five backward, where scores are computed again (arXiv 2205.14135). The
    width is the call's own: a generator or a teacher may have another."""
    concatenated = _scores_seen(config, lengths)

    def flops(kind: str, taken: Sequence[Tensor]) -> float:
        query = next(tensor for tensor in taken if tensor.dim() >= 3 and tensor.is_floating_point())
        padded = query.dim() == 4  # (B, heads, S, head size), else (T, heads, head size)
        scores = query.shape[0] * query.shape[2] ** 2 if padded else concatenated
        width = query.shape[-1] * query.shape[1 if padded else -2]
        return (4.0 if kind == "attention" else 10.0) * scores * width

    return flops


class _OnGpu:
    """The attributes of the hidden vectors that `select_kernel` reads, as on a GPU."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, hidden: Tensor, dtype: torch.dtype) -> None:
        self.dtype, self.dim = dtype, hidden.dim


def efficient_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: attention.Layout,
    bias: Tensor | None,
    probability: float,
    dropout_seed: int | None,
    scale: float | None = None,
) -> tuple[Tensor, None]:
    """The kernel that torch's scaled dot product attention becomes on CUDA where there is a bias."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    dropped = 0.0 if dropout_seed is None else probability
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    result = operator(query, key, value, bias, True, dropped, False, scale=scale)[0]
    return result.transpose(1, 2), None


# Sizes that are read by whether a tensor is on a GPU.
_SIZES_BY_DEVICE = (
    (heads, "_CHUNK_ELEMENTS"),
    (dropout, "_CHUNK_PAIRS"),
    (sampling, "_CHUNK_ELEMENTS"),
    (embeddings, "_BLOCK_ELEMENTS"),
)


@contextlib.contextmanager
def _as_on_gpu(has_flash: bool) -> Iterator[None]:
    """Let the model do what it does on a GPU: patches the places where it asks for its device."""

    def select(name: str, config: BertConfig, hidden: Tensor, *rest: bool) -> str:
        seen: Any = _OnGpu(hidden, hidden.dtype)
        return choose(name, config, seen, *rest)

    choose = attention.select_kernel
    with contextlib.ExitStack() as patched:
        patched.enter_context(patch.object(bert, "select_kernel", select))
        patched.enter_context(patch.object(attention, "_has_flash", lambda device: has_flash))
        patched.enter_context(patch.dict(attention.KERNELS, sdpa=efficient_sdpa))
        for module, name in _SIZES_BY_DEVICE:
            on_gpu = getattr(module, name)[True]
            patched.enter_context(patch.object(module, name, {False: on_gpu, True: on_gpu}))
        yield


@dataclass(frozen=True)
class TracedBatch:
    """A micro-batch by its sizes."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    masked: int
    """Number of tokens to predict in all sequences."""
    padded: bool = False
    """Whether the model is given (B, S) with a mask, as other codes do, and not concatenated tokens."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def offsets(self) -> Tensor:
        """Where each sequence begins among the concatenated tokens, and the last one's end: int32 (B + 1,)."""
        return torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int32)

    def inputs(self) -> MicroBatch:
        """Inputs of forward without values; all but the offsets, whose values CPU kernels read."""
        longest, count = max(self.lengths), len(self.lengths)

        def ids(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64)

        tokens, places = [count, longest], [count, self.masked // count]
        only: Fields = {"attention_mask": torch.empty(tokens, dtype=torch.bool)}
        if not self.padded:
            tokens, places, only = [self.tokens], [self.masked], {"max_sequence_length": longest}
        of_tokens = {name: ids(*tokens) for name in ("input_ids", "token_type_ids", "position_ids")}
        of_places = {name: ids(*places) for name in ("masked_positions", "labels")}
        return only | of_tokens | of_places | {"next_sentence_label": ids(count), "dropout_seed": 1}

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts.of_lengths(self.lengths, self.masked)


@dataclass(frozen=True)
class ModelRun:
    """How the model is run: what of the configuration and of the device decides its kernels."""

    config: BertConfig
    on_gpu: bool = True
    has_flash: bool = True
    attention_kernel: str = "auto"
    gradient_checkpointing: str = "none"
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = torch.bfloat16
    """What products are cast to; None: nothing is cast."""
    objective: Objective | None = None
    """What the model is trained for, of a configuration with the same model; None: masked tokens and pairs."""

    def copies(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """The 16-bit weights with which a step computes (model/weight_copies.py)."""
        if not self.on_gpu or self.autocast is None or self.weights != torch.float32:
            return contextlib.nullcontext()
        return WeightCopies(model, self.autocast)

    def build(self) -> BertPreTrained:
        """A model of fake tensors; under FakeTensorMode."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.weights)
        try:
            if self.objective is not None:
                return self.objective.build_model()
            return BertForPreTraining(
                self.config, attention_kernel=self.attention_kernel, gradient_checkpointing=self.gradient_checkpointing
            )
        finally:
            torch.set_default_dtype(before)

    def loss(self, output: ModelOutput, inputs: MicroBatch) -> Tensor:
        """The loss, ()."""
        if self.objective is None:
            return output.mlm_losses.sum() + output.next_sentence_losses.sum()
        return self.objective(output, inputs, torch.ones(len(self.objective.TERMS), dtype=torch.float64))[0]


def kernel_of(run: ModelRun) -> str:
    """The attention kernel of training."""
    tokens = torch.empty(0, run.config.hidden_size, dtype=run.autocast or run.weights)
    with _as_on_gpu(run.has_flash) if run.on_gpu else contextlib.nullcontext():
        return bert.select_kernel(run.attention_kernel, run.config, tokens, False)


@contextlib.contextmanager
def record(config: BertConfig, lengths: Sequence[int], layers: Sequence[nn.Module] = ()) -> Iterator[Trace]:
    """Write down what runs within, under FakeTensorMode: of a model of such a shape on such sequences."""
    recorder = _Recorder(_attention_flops(config, lengths))
    for layer in layers:
        recorder.follow(layer)
    with recorder, patch.object(heads, "fill_losses", recorder.once_a_size(heads.fill_losses)):
        yield recorder.trace


def trace_micro_step(run: ModelRun, batch: TracedBatch) -> Trace:
    """Forward and backward of a micro-batch, gradients added to those that are there. The peak is what tensors hold
    beyond weights and gradients.
    """
    offsets = batch.offsets()
    # A CPU adds no rows here: added rows would make the offsets of the sequences fake tensors, and the groups of
    # attention need their values.
    rows_as_they_are = patch.object(amx, "_SIZES_PER_OCTAVE", dict.fromkeys((False, True)))
    place = _as_on_gpu(run.has_flash) if run.on_gpu else contextlib.nullcontext()
    for model in run.objective.frozen if run.objective else ():
        model.to(run.weights)  # as the run does; under FakeTensorMode its weights would be lost
    with FakeTensorMode(allow_non_fake_inputs=True), place, rows_as_they_are:
        model = run.build()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        inputs = batch.inputs() | ({} if batch.padded else {"sequence_offsets": offsets})
        layers = [module for module in model.modules() if isinstance(module, EncoderLayer)]  # of each of its encoders
        with record(run.config, batch.lengths, layers) as trace, run.copies(model):
            trace.once, trace.kernels[:] = list(trace.kernels), []
            with torch.autocast("cpu", run.autocast or torch.bfloat16, enabled=run.autocast is not None):
                output = model(**inputs)
            loss = run.loss(output, inputs)
            trace.forward = len(trace.kernels)
            loss.backward()
            del output, loss
    return trace


def trace_optimizer(run: ModelRun, build: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Trace, int]:
    """A step of the optimizer over fp32 weights, whatever the run computes with, after its first; and bytes of its
    states."""
    tiny = BertForPreTraining(
        BertConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    for parameter in tiny.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build(tiny).step()  # what its code keeps for good must not be made of fake tensors
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = replace(run, weights=torch.float32).build()
        optimizer = build(model)
        if isinstance(optimizer, MuonWithAdamW):
            optimizer.at_once = run.on_gpu
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        recorder = _Recorder(lambda kind, taken: 0.0)
        with recorder:
            optimizer.step()
        states = sum(
            _bytes(leaf)
            for state in optimizer.state.values()
            for leaf in tree_leaves(state)
            if isinstance(leaf, Tensor) and leaf.dim()
        )
    return recorder.trace, states
