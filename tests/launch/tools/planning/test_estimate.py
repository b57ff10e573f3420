"""The estimate is earned: with its one set of constants it gives rates that others have published, within a fifth.

What is traced is the code that was measured, or its kernels: transformers' own BERT; NVIDIA's BERT-large as our model
with 16-bit weights, padded, with the attention it had; ModernBERT in miniature, below.
"""

from functools import cache

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.overrides import TorchFunctionMode

from cloze.launch.engine.optimizers.adam_family import Lamb, StableAdamW
from cloze.launch.tools.planning.assumptions import NETWORK_GIGABYTES
from cloze.launch.tools.planning.estimate import Cluster
from cloze.launch.tools.planning.machines import find_machine
from cloze.launch.tools.planning.memory import traffic
from cloze.launch.tools.planning.roofline import cost
from cloze.launch.tools.planning.trace import ModelRun, TracedBatch, record, trace_micro_step, trace_optimizer
from cloze.model.config import BertConfig

WITHIN = 0.20
LARGE = BertConfig(
    vocab_size=30528, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)
MODERN = BertConfig(
    vocab_size=50368,
    num_hidden_layers=22,
    intermediate_size=1152,
    position_embedding="rotary",
    gated_feed_forward=True,
    pooler=False,
    type_vocab_size=0,
    local_attention_window=128,
    linear_bias=False,
    norm_bias=False,
    norm_position="pre",
)


class CudaAutocast(TorchFunctionMode):
    """What CUDA's autocast computes in fp32 and the CPU's, under which traces run, does not (ATen/autocast_mode.h)."""

    PRECISE = {F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax, F.cross_entropy, F.log_softmax}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in self.PRECISE:
            return function(*args, **(kwargs or {}))
        precise = [
            each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in args
        ]
        return function(*precise, **(kwargs or {}))


def trace_of(build, inputs, config: BertConfig, lengths: tuple[int, ...]):
    """Forward and backward of a module under CUDA's autocast; `inputs`: makes what it takes, it gives the loss."""
    with FakeTensorMode():
        model = build().train()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        given = inputs()
        with record(config, lengths) as trace:
            with torch.autocast("cpu", torch.bfloat16), CudaAutocast():
                loss = model(**given)
            loss.backward()
    return trace


def sequences_per_second(
    device: str,
    gpus: int,
    traces,
    sequences: int,
    micro_steps: int,
    *,
    count: int,
    bytes_a_gradient=4,
    network=NETWORK_GIGABYTES,
) -> float:
    """Of one GPU: micro-steps, the sum of the gradients of `count` weights over all GPUs, the optimizer."""
    trace, optimizer = traces
    machine = find_machine(device)
    cluster = Cluster(machine, gpus, 8, network * 1e9)
    sent, collectives = traffic(0, count, gpus, micro_steps, precision="bf16")
    seconds = (
        micro_steps * cost(machine, trace).seconds
        + cost(machine, optimizer).seconds
        + cluster.collective_seconds(sent * bytes_a_gradient / 4, collectives)
    )
    return micro_steps * sequences / seconds


@cache
def nvidia(kernel: str):
    """BERT-large at 128 with 16-bit weights, 256 padded sequences, 20 predictions: a micro-step, and LAMB's step."""
    run = ModelRun(LARGE, weights=torch.float16, autocast=None, attention_kernel=kernel)
    return trace_micro_step(run, TracedBatch((128,) * 256, 20 * 256, padded=True)), lambs_step()


@cache
def lambs_step():
    """Which no kernel of attention changes."""
    optimizer, _ = trace_optimizer(
        ModelRun(LARGE, weights=torch.float16, autocast=None),
        lambda model: Lamb(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    )
    return optimizer


@pytest.mark.parametrize(
    ("published", "kernel", "gpus", "micro_steps"),
    [
        # DeepLearningExamples, PyTorch: micro-batches of 256† (attention by products and softmax), on one GPU and on
        # 256.
        (580, "eager", 1, 32),
        (540, "eager", 256, 1),
        # The same, PaddlePaddle 22.12: micro-batches of 256, "cuDNN fused attention", one GPU, eight, 256.
        (694, "sdpa", 1, 32),
        (5541 / 8, "sdpa", 8, 32),
        (157952 / 256, "sdpa", 256, 1),
    ],
)
def test_bert_large_at_128_on_a100(published, kernel, gpus, micro_steps):
    """A DGX A100 has eight network cards of 200 Gbit/s; gradients are sent in 16 bits."""
    rate = sequences_per_second(
        "a100-80gb", gpus, nvidia(kernel), 256, micro_steps, bytes_a_gradient=2, count=336_000_000, network=25.0
    )
    assert rate == pytest.approx(published, rel=WITHIN)


def test_the_hours_of_bert_base_in_mosaicberts_comparison():
    """70,000 steps of 4,096 at 128 in 11.5 hours on eight A100-80GB: transformers' BERT, micro-batches of 128, bf16
    autocast (mosaicml/examples, benchmarks/bert/README.md; the model card of mosaic-bert-base).
    """
    config = transformers.BertConfig(vocab_size=30528, attn_implementation="eager")

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertForMaskedLM(config)

        def forward(self, **inputs):
            return self.model(**inputs).loss

    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    trace = trace_of(
        WithLoss,
        lambda: {name: torch.empty(128, 128, dtype=torch.int64) for name in names},
        BertConfig(vocab_size=30528),
        (128,) * 128,
    )
    optimizer, _ = trace_optimizer(
        ModelRun(BertConfig(vocab_size=30528)),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=False, fused=False),
    )
    rate = sequences_per_second("a100-80gb", 8, (trace, optimizer), 128, 4, count=110_000_000)
    assert 70_000 * 4096 / (8 * rate) / 3600 == pytest.approx(11.5, rel=WITHIN)


class OneKernel(torch.autograd.Function):
    """Stands for a fused kernel that reads and writes its input, and does so in backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


class GatedActivation(torch.autograd.Function):
    """Stands for one of two halves in, one out."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return nn.functional.glu(inputs, -1)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.aten.glu_backward(gradient, ctx.saved_tensors[0], -1)


class ModernLayer(nn.Module):
    """Its kernels: norms apart, rotation and gated activation one kernel each (Triton; torch.compile), flash attention,
    dropout of what attention gives (yamls/modernbert/modernbert-base-pretrain.yaml in AnswerDotAI/ModernBERT).
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.Identity() if first else nn.LayerNorm(768, bias=False)
        self.qkv, self.output = nn.Linear(768, 3 * 768, bias=False), nn.Linear(768, 768, bias=False)
        self.norm = nn.LayerNorm(768, bias=False)
        self.up, self.down = nn.Linear(768, 2 * 1152, bias=False), nn.Linear(1152, 768, bias=False)

    def forward(self, hidden, offsets):
        packed = OneKernel.apply(self.qkv(self.attention_norm(hidden))).view(-1, 3, 12, 64)
        mixed = varlen_attn(*packed.unbind(1), offsets, offsets, 1024, 1024).flatten(1)
        hidden = hidden + nn.functional.dropout(self.output(mixed), 0.1)
        return hidden + self.down(GatedActivation.apply(self.up(self.norm(hidden))))


class Modern(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.embedding_norm = nn.Embedding(50368, 768), nn.LayerNorm(768, bias=False)
        self.layers = nn.ModuleList(ModernLayer(number == 0) for number in range(22))
        self.final_norm, self.dense = nn.LayerNorm(768, bias=False), nn.Linear(768, 768, bias=False)
        self.head_norm, self.bias = nn.LayerNorm(768, bias=False), nn.Parameter(torch.zeros(50368))

    def forward(self, ids, offsets, masked, labels):
        hidden = self.embedding_norm(self.words(ids))
        for layer in self.layers:
            hidden = layer(hidden, offsets)
        hidden = self.head_norm(nn.functional.gelu(self.dense(self.final_norm(hidden).index_select(0, masked))))
        scores = nn.functional.linear(hidden, self.words.weight, self.bias)
        return OneKernel.apply(scores).sum()  # its cross-entropy is one kernel a direction


def test_the_hours_of_modernbert_base():
    """1,719B tokens at 1,024 in 194 hours† on eight H100: 307,000 tokens a second a GPU, micro-batches of 96, 30%
    masked (arXiv 2412.13663, table 3†; the yaml named above).
    """
    tokens, masked = 96 * 1024, int(0.3 * 96 * 1024)

    def inputs():
        return {
            "ids": torch.empty(tokens, dtype=torch.int64),
            "offsets": torch.empty(97, dtype=torch.int32),
            "masked": torch.empty(masked, dtype=torch.int64),
            "labels": torch.empty(masked, dtype=torch.int64),
        }

    trace = trace_of(Modern, inputs, MODERN, (1024,) * 96)
    optimizer, _ = trace_optimizer(
        ModelRun(MODERN), lambda model: StableAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    )
    rate = sequences_per_second("h100", 8, (trace, optimizer), 96, 6, count=149_000_000) * 1024
    assert 1.719e12 / (8 * rate) / 3600 == pytest.approx(194.2, rel=WITHIN)
