"""One step of the real engine and the real Trainer on a fake GPU; a process that answers each line with a report.

    python -m tests.gpu.worker libfakecuda.so <<< '{"stage": 1}'
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

WORLD_SIZE = 64
MICRO_STEPS = 2
WARM_STEPS = 2  # optimizers make their states in the first; DeepSpeed learns its order of parameters


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


@dataclass(frozen=True)
class Report:
    """What `fake_cuda.Log` holds after one step, its micro-steps included."""

    waits: dict[str, int]
    events: list[int]
    launches: dict[str, int]
    copies: dict[str, int]
    collectives: list[tuple[str, str, int]]
    misplaced: dict[str, int]
    parameters: int
    optimizer: str


class _Silent:
    """Heartbeat, checkpoints and console of a run that has none."""

    running = False

    def written(self) -> bool:
        return False

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def prepare(library: Path) -> None:
    """Make this process rank 0 of many, on a fake GPU."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29511", DS_ACCELERATOR="cuda")
    from tests.gpu import fake_cuda

    fake_cuda.install(library)
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cloze.launch.system.environment import prepare_deepspeed, read_environment

    prepare_deepspeed(read_environment())
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda *_: None  # the other ranks answer with nothing
    _warm_up()


def _warm_up() -> None:
    """What each case would else do anew after its fork: import, and learn the shapes of a forward pass."""
    import gc

    import deepspeed.compile.backend  # noqa: F401
    import torch
    import torch._dynamo
    import torch.utils.checkpoint  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensorMode

    import cloze.launch.engine.building
    import cloze.launch.training.trainer  # noqa: F401
    from cloze.launch.pretrain.command import build_model
    from tests.gpu.fake_cuda import watch

    config = configuration(Case())
    with FakeTensorMode(allow_non_fake_inputs=True), watch():
        model = build_model(config).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            for lengths in _LENGTHS:  # without backward: its threads would not survive a fork
                flat = {name: value.to("cuda", non_blocking=True) if isinstance(value, torch.Tensor) else value
                        for name, value in _micro_batch(lengths).items()}
                model(**flat, dropout_seed=1)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage at every turn


def configuration(case: Case):
    """The configuration of a run like `case`."""
    from cloze.launch.config import PretrainConfig
    from cloze.model.config import BertConfig

    model = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=case.layers, num_attention_heads=2, intermediate_size=512,
        hidden_dropout_prob=case.hidden_dropout, attention_probs_dropout_prob=case.attention_dropout,
        position_embedding=case.position_embedding,
    )
    config = PretrainConfig(data="", output="", model=model)
    micro_batch_size = len(_LENGTHS[0])
    train = replace(
        config.train, global_batch_size=WORLD_SIZE * micro_batch_size * MICRO_STEPS, micro_batch_size=micro_batch_size,
        max_steps=9, learning_rate=1e-4, precision=case.precision, loss_reduction=case.loss_reduction,
        gradient_checkpointing=case.gradient_checkpointing,
    )
    optimizer = replace(config.optimizer, name=case.optimizer, bias_correction=case.bias_correction)
    zero = replace(config.zero, stage=case.stage, offload_optimizer=case.offload)
    return replace(config, train=train, optimizer=optimizer, zero=zero)


_LENGTHS = ((100, 128, 7), (31, 30, 29), (128, 128, 128), (3, 90, 64))


def _micro_batch(lengths: tuple[int, ...]) -> dict:
    import torch

    total = sum(lengths)
    masked = torch.arange(1, total, 7)
    return {
        "input_ids": torch.zeros(total, dtype=torch.long), "token_type_ids": torch.zeros(total, dtype=torch.long),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sequence_offsets": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_sequence_length": max(lengths), "masked_positions": masked, "labels": torch.zeros_like(masked),
        "next_sentence_label": torch.zeros(len(lengths), dtype=torch.long),
    }


def batches(config, mixed: bool):
    """Endless batches of a rank, no two neighbouring micro-batches alike; of two sources, if they are mixed."""
    import numpy as np
    import torch

    from cloze.pipeline.loading.batches import RankBatch

    position = 0
    while True:
        size = config.train.global_batch_size
        micro = [_micro_batch(_LENGTHS[(position // size * MICRO_STEPS + step) % len(_LENGTHS)])
                 for step in range(MICRO_STEPS)]
        tokens, masked = (sum(len(each[name]) for each in micro) for name in ("input_ids", "labels"))
        yield RankBatch(micro, position=position, epoch=0, num_samples=size, num_tokens=tokens, num_masked=masked,
                        num_pairs=6, num_padding=10, indices=np.zeros(0),
                        sources=[torch.tensor([0, 1, 0])] * MICRO_STEPS if mixed else None)
        position += size


def trainer_of(case: Case):
    """The trainer of a run like `case`, its model and engine on the fake GPU; to be called under FakeTensorMode."""
    import torch

    from cloze.launch.engine.building import build_engine
    from cloze.launch.engine.config import deepspeed_config
    from cloze.launch.pretrain.command import build_model
    from cloze.launch.pretrain.objectives.table import make_objective
    from cloze.launch.system.environment import read_environment
    from cloze.launch.training.trainer import Trainer
    from tests.gpu.fake_cuda import on_the_host

    config, device = configuration(case), torch.device("cuda", 0)
    objective = make_objective(config)
    engine = build_engine(build_model(config, objective), config, deepspeed_config(config, WORLD_SIZE), device)
    objective.counts = on_the_host(objective.counts)
    return Trainer(
        config, engine=engine, objective=objective, evaluate=None, flops=lambda _: 1.0, checkpoints=_Silent(),
        console=_Silent(), environment=read_environment(), device=device, heartbeat=_Silent(), profiler=_Silent(),
        facts={}, sources=_sources() if case.mixed else None,
    )


def _sources():
    """What measures two sources."""
    from cloze.launch.pretrain.sources import Sources
    from cloze.pipeline.loading.mixture import Phase

    split = types.SimpleNamespace(counts={"samples": 10})
    manifest = types.SimpleNamespace(splits={"train": split}, pair_sets=1)
    data = types.SimpleNamespace(names=("a", "b"), manifests=(manifest,) * 2, phases=(Phase(0, (1.0, 1.0)),))
    return Sources(data, 8)


def report(case: Case) -> Report:
    """What one step asks of the device, after some that it learns from."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.gpu.fake_cuda import LOG, on_the_host, watch

    stop = types.SimpleNamespace(wanted=0.0)
    LOG.listening = False
    with FakeTensorMode(allow_non_fake_inputs=True), watch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(case)
        trainer.engine.train()
        stream = batches(trainer.config, case.mixed)
        given = iter(on_the_host(lambda: next(stream)), None)
        for _ in range(WARM_STEPS):
            trainer._advance(given, stop)
        LOG.clear()
        LOG.listening = True
        trainer._advance(given, stop)
        LOG.listening = False
        from cloze.launch.engine.state import base_optimizer

        return Report(
            dict(LOG.waits), LOG.events, dict(LOG.launches), dict(LOG.copies), LOG.collectives, dict(LOG.misplaced),
            len(list(trainer.engine.module.parameters())), type(base_optimizer(trainer.engine)).__name__,
        )


def answer(line: str) -> dict:
    """The report on one case, or its traceback."""
    try:
        return asdict(report(Case(**json.loads(line))))
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # DeepSpeed prints
    prepare(Path(sys.argv[1]))
    for line in sys.stdin:
        # Each case in a process of its own: DeepSpeed keeps what it was told (torch_autocast.py) longer than an engine.
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        os.write(answers, json.dumps(answer(line)).encode() + b"\n")
        os._exit(0)


if __name__ == "__main__":
    main()
