"""What the worker's processes run: a case, its configuration, and the world that it is in."""

from __future__ import annotations

from dataclasses import dataclass, replace

WORLD_SIZE = 64
MICRO_STEPS = 2
# Tokens of the sequences of micro-batches, in turn.
LENGTHS = ((100, 128, 7), (31, 30, 29), (128, 128, 128), (3, 90, 64))


@dataclass(frozen=True)
class Case:
    """What of a run a step depends on."""

    stage: int = 0
    optimizer: str = "adamw"
    bias_correction: bool = True
    loss_reduction: str = "tokens"
    precision: str = "bf16"
    offload: bool = False
    layers: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.0
    position_embedding: str = "learned"
    gradient_checkpointing: str = "none"
    mixed: bool = False
    objective: str = "masked"
    ema_decay: float | None = None
    preset: str | None = None
    """Whose shape the model has, with as many layers; None: a small one."""
    world_size: int = WORLD_SIZE


@dataclass(frozen=True)
class Recipe:
    """A recipe of configs/pretrain/ with micro-batches of one size."""

    name: str
    stage: int
    processes: int
    sequences: int
    """Of a micro-batch."""
    length: int
    """Tokens of each of them."""
    masked: int
    """Tokens to predict of each."""


@dataclass(frozen=True)
class Compiled:
    """A model whose layers are compiled by Inductor."""

    model: str
    """A preset's name."""
    layers: int
    capability: int = 90
    """Of the GPU that it is compiled for: 90 is an H100's."""
    binaries: bool = False
    """Whether Triton makes binaries of the kernels."""


@dataclass(frozen=True)
class Graphs:
    """A run whose layers are compiled, with a trial of micro-batches before it."""

    next_tokens: bool
    """Whether it begins with next tokens."""


@dataclass(frozen=True)
class Copied:
    """Tensors on the device that are copied for a checkpoint, two of them with one storage."""

    tensors: int


# Tokens of the sequences of a compiled model's micro-batches, in turn.
COMPILED_LENGTHS = ((512,) * 32, (512,) * 29 + (33, 12, 77))


def batch_size(world_size: int) -> int:
    """Global batch of so many ranks with the micro-batches above."""
    return world_size * len(LENGTHS[0]) * MICRO_STEPS


def configuration(case: Case):
    """The configuration of a run like `case`."""
    from cloze.launch.config import PretrainConfig
    from cloze.model.config import BertConfig

    model = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=case.layers,
        num_attention_heads=2,
        intermediate_size=512,
        hidden_dropout_prob=case.hidden_dropout,
        attention_probs_dropout_prob=case.attention_dropout,
        position_embedding=case.position_embedding,
    )
    if case.preset is not None:
        model = replace(BertConfig.preset(case.preset, vocab_size=30522), num_hidden_layers=case.layers)
    if case.objective == "replaced_tokens":
        model = replace(model, embedding_size=64, pooler=False)
    config = PretrainConfig(data="", output="", model=model, objective=case.objective)
    micro_batch_size = len(LENGTHS[0])
    train = replace(
        config.train,
        global_batch_size=batch_size(case.world_size),
        micro_batch_size=micro_batch_size,
        max_steps=9,
        learning_rate=1e-4,
        precision=case.precision,
        loss_reduction=case.loss_reduction,
        gradient_checkpointing=case.gradient_checkpointing,
    )
    optimizer = replace(config.optimizer, name=case.optimizer, bias_correction=case.bias_correction)
    zero = replace(config.zero, stage=case.stage, offload_optimizer=case.offload)
    ema = replace(config.ema, decay=case.ema_decay)
    return replace(config, train=train, optimizer=optimizer, zero=zero, ema=ema)


def join(rank: int, world_size: int) -> None:
    """Become one of so many, of which the others answer at once, with nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
