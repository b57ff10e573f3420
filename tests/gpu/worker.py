"""One step of the real engine and the real loop on a fake GPU; a process that answers each line with a report.

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

from tests.gpu import large_world
from tests.gpu.cases import (
    COMPILED_LENGTHS,
    LENGTHS,
    MICRO_STEPS,
    WORLD_SIZE,
    Case,
    Compiled,
    Copied,
    Graphs,
    Recipe,
    configuration,
    join,
)


def warm_steps(stage: int) -> int:
    """Steps before the one that is watched: optimizers make their states in the first, and in the second DeepSpeed uses
    at stage 3 the order of parameters that it has learned.
    """
    return 2 if stage == 3 else 1


@dataclass(frozen=True)
class Report:
    """What `fake_cuda.Log` holds after one step, its micro-steps included."""

    waits: dict[str, int]
    events: list[int]
    launches: dict[str, int]
    copies: dict[str, int]
    collectives: list[tuple[str, str, int]]
    queued: list[int]
    misplaced: dict[str, int]
    parameters: int
    optimizer: str


class _Silent:
    """Heartbeat, checkpoints and console of a run that has none."""

    running = False

    def publish_votes(self) -> int:
        return 0

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def prepare(library: Path) -> None:
    """Make this process rank 0 of many, on a fake GPU."""
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29511",
        DS_ACCELERATOR="cuda",
    )
    from tests.gpu import fake_cuda

    fake_cuda.install(library)
    from cloze.launch.system.environment.launchers import read_environment
    from cloze.launch.system.environment.process import fewer_imports, prepare_deepspeed

    prepare_deepspeed(read_environment())
    with fewer_imports():
        import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda *_: None  # the other ranks answer with nothing
    _warm_up()


def _warm_up() -> None:
    """What each case would else do anew after its fork: import, and learn the shapes of a forward pass."""
    import gc

    import deepspeed.compile.backend
    import deepspeed.module_inject.auto_ep_layer  # noqa: F401
    import torch
    import torch._dynamo
    import torch.utils.checkpoint  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensorMode

    import cloze.launch.training.loop  # noqa: F401
    from cloze.launch.pretrain.first_model import build_model
    from tests.gpu.fake_cuda import watch

    config = configuration(Case())
    with FakeTensorMode(allow_non_fake_inputs=True), watch():
        model = build_model(config).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            for lengths in LENGTHS:  # without backward: its threads would not survive a fork
                flat = {
                    name: value.to("cuda", non_blocking=True) if isinstance(value, torch.Tensor) else value
                    for name, value in _micro_batch(lengths).items()
                }
                model(**flat, dropout_seed=1)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage at every turn


def _micro_batch(lengths: tuple[int, ...], masked: int | None = None) -> dict:
    """Sequences of these lengths; masked: tokens to predict of each, or every seventh."""
    import torch

    total = sum(lengths)
    positions = torch.arange(1, total, 7)
    if masked is not None:
        positions = torch.arange(masked * len(lengths))
    return {
        "input_ids": torch.zeros(total, dtype=torch.long),
        "token_type_ids": torch.zeros(total, dtype=torch.long),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sequence_offsets": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_sequence_length": max(lengths),
        "masked_positions": positions,
        "labels": torch.zeros_like(positions),
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
        micro = [
            _micro_batch(LENGTHS[(position // size * MICRO_STEPS + step) % len(LENGTHS)]) for step in range(MICRO_STEPS)
        ]
        tokens, masked = (sum(len(each[name]) for each in micro) for name in ("input_ids", "labels"))
        yield RankBatch(
            micro,
            position=position,
            epoch=0,
            num_samples=size,
            num_tokens=tokens,
            num_masked=masked,
            num_pairs=6,
            num_padding=10,
            indices=np.zeros(0),
            sources=[torch.tensor([0, 1, 0])] * MICRO_STEPS if mixed else None,
        )
        position += size


def loop_of(config, world_size: int = WORLD_SIZE, mixed: bool = False):
    """The loop of a run, its model and engine on the fake GPU; to be called under FakeTensorMode."""
    import torch

    from cloze.launch.engine.config import deepspeed_config
    from cloze.launch.engine.engine import Engine
    from cloze.launch.pretrain.first_model import build_model
    from cloze.launch.pretrain.objectives.factory import make_objective
    from cloze.launch.system.environment.launchers import read_environment
    from cloze.launch.training.callbacks import RunView
    from cloze.launch.training.loop import Loop
    from cloze.launch.training.metric_sums import MetricWindow
    from cloze.launch.training.skipped_steps import TrainProgress
    from cloze.launch.training.throughput import Throughput
    from cloze.launch.training.weight_average import WeightAverage
    from tests.gpu.fake_cuda import on_the_host

    device, objective, silent = torch.device("cuda", 0), make_objective(config), _Silent()
    engine = Engine(build_model(config, objective), config, deepspeed_config(config, world_size), device)
    objective.counts = on_the_host(objective.counts)
    sources = _sources() if mixed else None
    progress = TrainProgress(
        MetricWindow(len(objective.NAMES), sources.num_sums if sources else 0, device),
        most_skipped=config.train.max_skipped_steps,
        keeps_skipped=engine.scales_loss,
        warn=print,
    )
    environment, steps = read_environment(), config.train.max_steps
    average = [WeightAverage(engine, config.ema, steps, environment.rank)] if config.ema.wanted else []
    loop = Loop(
        config,
        engine,
        objective,
        sources,
        lambda _: 1.0,
        progress,
        silent,
        average,
        silent.give_up,
        Throughput(device, None, silent),
        environment,
    )
    engine.model.train()
    for watcher in average:
        watcher.on_start(RunView(engine.model, device, environment.rank, world_size, progress.state))
    return loop


def _sources():
    """What measures two sources."""
    from cloze.launch.pretrain.source_statistics import Sources
    from cloze.pipeline.loading.mixture import Phase

    split = types.SimpleNamespace(counts={"samples": 10})
    manifest = types.SimpleNamespace(splits={"train": split}, pair_sets=1)
    data = types.SimpleNamespace(names=("a", "b"), manifests=(manifest,) * 2, phases=(Phase(0, (1.0, 1.0)),))
    return Sources(data, 8)


def report(case: Case) -> Report:
    """What one step asks of the device, after some that it learns from."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.gpu.fake_cuda import LOG, on_the_host, watch

    os.environ["WORLD_SIZE"] = str(case.world_size)
    join(0, case.world_size)
    LOG.listening = False
    with FakeTensorMode(allow_non_fake_inputs=True), watch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = loop_of(configuration(case), case.world_size, case.mixed)
        _, batch = on_the_host(lambda stream: (next(stream), next(stream)))(batches(loop.config, case.mixed))
        # Of the watched step's two shapes one is new, as in each step of a run; the other one costs less here.
        last = replace(batch, micro_batches=batch.micro_batches[-1:])
        for _ in range(warm_steps(case.stage)):
            loop.step(iter([last]))
        LOG.clear()
        LOG.listening = True
        loop.step(iter([batch]))
        LOG.listening = False

        return Report(
            dict(LOG.waits),
            LOG.events,
            dict(LOG.launches),
            dict(LOG.copies),
            LOG.collectives,
            LOG.queued,
            dict(LOG.misplaced),
            len(list(loop.engine.model.parameters())),
            loop.engine.optimizer_name,
        )


def peak_bytes(recipe: Recipe) -> int:
    """The most that tensors of a GPU hold in a step of a recipe, with its weights and all that belongs to them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cloze.launch import commands
    from cloze.launch.tools.planning.trace import efficient_sdpa
    from cloze.model.attention import KERNELS
    from cloze.pipeline.loading.batches import RankBatch
    from tests.gpu.fake_cuda import LOG, on_the_host, watch

    join(0, recipe.processes)
    KERNELS["sdpa"] = efficient_sdpa  # which of torch's kernels serves is decided by code that is not in this build
    config = commands.parse("pretrain", ["--config", recipe.name, "--data", "nowhere", "--output", "nowhere"])
    size = recipe.processes * recipe.sequences * MICRO_STEPS
    train = replace(
        config.train,
        global_batch_size=size,
        micro_batch_size=recipe.sequences,
        learning_rate=1e-4,
        initial_global_batch_size=None,
        batch_increment=None,
        batch_warmup_tokens=0,
        compile=False,
    )
    config = replace(
        config,
        train=train,
        model=replace(config.model, vocab_size=30522),
        zero=replace(config.zero, stage=recipe.stage),
    )

    @on_the_host
    def batch(micro_steps: int) -> RankBatch:
        micro = [_micro_batch((recipe.length,) * recipe.sequences, recipe.masked) for _ in range(micro_steps)]
        return RankBatch(
            micro,
            position=0,
            epoch=0,
            num_samples=size,
            num_tokens=1,
            num_masked=1,
            num_pairs=1,
            num_padding=0,
            indices=torch.zeros(0).numpy(),
            sources=None,
        )

    LOG.weighing = True
    with FakeTensorMode(allow_non_fake_inputs=True), watch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = loop_of(config, recipe.processes)
        for micro_steps in (1, MICRO_STEPS):  # the optimizer makes its states in the first
            loop.step(iter([batch(micro_steps)]))
    return LOG.peak_bytes


def compiled(case: Compiled) -> dict:
    """Kernels that Inductor makes of the layers, graphs, and what a second micro-step starts of them: (name, bytes)."""
    import torch
    import torch._dynamo.utils as dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cloze.model.bert import BertForPreTraining
    from cloze.model.config import BertConfig
    from cloze.model.weight_copies import WeightCopies
    from tests.gpu import fake_triton

    made = fake_triton.install(case.capability, case.binaries)
    config = replace(BertConfig.preset(case.model, vocab_size=1000), num_hidden_layers=case.layers)
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("cuda"):
            model = BertForPreTraining(config)
        model.bert.encoder.compile_layers()
        for lengths in COMPILED_LENGTHS:
            made.started.clear()
            batch = {
                name: value.to("cuda") if isinstance(value, torch.Tensor) else value
                for name, value in _micro_batch(lengths, 76).items()
            }
            with WeightCopies(model, torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
                output = model(**batch, dropout_seed=1)
                (output.mlm_losses.sum() + output.next_sentence_losses.sum()).backward()
    return {"started": made.started, "binaries": made.binaries, "graphs": dynamo.counters["stats"]["unique_graphs"]}


def graphs(case: Graphs) -> list[int]:
    """Graphs that Dynamo has made after the trial of micro-batches, after steps, and after each of two evaluations."""
    import torch
    import torch._dynamo.utils as dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cloze.launch.engine.config import deepspeed_config
    from cloze.launch.engine.engine import Engine
    from cloze.launch.pretrain.first_model import build_model
    from cloze.launch.pretrain.micro_batch_size import Probe, ProbeBatches
    from cloze.launch.system.devices import to_device
    from cloze.launch.system.distributed import NumbersOnHost
    from cloze.model.encoder import Encoder
    from tests.gpu.fake_cuda import on_the_host

    join(0, WORLD_SIZE)
    NumbersOnHost.take = lambda copy: [0.0] * copy._host.numel()
    compile_layers = Encoder.compile_layers
    Encoder.compile_layers = lambda encoder: compile_layers(encoder, backend="eager")  # graphs are Dynamo's
    config = configuration(Case(layers=3))
    config = replace(config, train=replace(config.train, compile=True))
    device, length = torch.device("cuda", 0), 8
    made = ProbeBatches(
        length, [0, 0, 0, 2, 0, 3, 0, 0, 5], 1000, 0.2, torch.device("cpu"), next_tokens=case.next_tokens
    )
    batches_of = on_the_host(made.of)
    on_device = types.SimpleNamespace(
        of=lambda size: [to_device(each, device) for each in batches_of(size)], device=device
    )

    def count() -> int:
        return dynamo.counters["stats"]["unique_graphs"]

    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = loop_of(config)
        loop.objective.counts = lambda micro_batches: [1.0] * len(loop.objective.TERMS)
        probed = Engine(build_model(config, loop.objective), config, deepspeed_config(config, WORLD_SIZE), device)
        Probe(probed, loop.objective, on_device, 1, MICRO_STEPS, False).run(length, lambda fits: fits)
        found = [count()]
        given = batches(config, False)
        for _ in range(2):
            batch = on_the_host(lambda: next(given))()
            for causal in (True, False) if case.next_tokens else (False,):
                next_tokens = on_the_host(_next_tokens)
                micro = [each | (next_tokens(each) if causal else {}) for each in batch.micro_batches]
                loop.step(iter([replace(batch, micro_batches=micro)]))
        found.append(count())
        loop.engine.model.eval()
        for lengths in LENGTHS[:2]:
            with torch.no_grad():
                loop.engine(**to_device(on_the_host(_micro_batch)(lengths), device))
            found.append(count())
    return found


def _next_tokens(batch: dict) -> dict:
    """What is another in a micro-batch of next tokens: all but the last of a sequence have one."""
    import torch

    lasts = (batch["sequence_offsets"][1:] - 1).tolist()
    positions = torch.tensor([place for place in range(len(batch["input_ids"])) if place not in lasts])
    return {"causal": True, "masked_positions": positions, "labels": torch.zeros_like(positions)}


def copied(case: Copied) -> dict:
    """What copying a file's content to the host asks of the device, and what its writer waits for."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cloze.launch.checkpoint.writing import ContentOnHost
    from tests.gpu.fake_cuda import LOG, watch

    with FakeTensorMode(allow_non_fake_inputs=True), watch():
        content = {str(number): torch.ones(1000, device="cuda") for number in range(case.tensors)}
        content["tied"] = content["0"].view(10, 100)
        LOG.clear()
        LOG.listening = True
        copy = ContentOnHost(content)
        waits, before = dict(LOG.waits), len(LOG.events)
        taken = copy.take()
        LOG.listening = False
    return {
        "waits": waits,
        "copies": dict(LOG.copies),
        "events": [before, len(LOG.events)],
        "devices": sorted({tensor.device.type for tensor in taken.values()}),
        "tied": taken["tied"].untyped_storage()._cdata == taken["0"].untyped_storage()._cdata,
    }


def answer(line: str) -> dict:
    """The report on one case, or what one rank of a large world has; or its traceback."""
    question = json.loads(line)
    try:
        if "rank" in question:
            return large_world.part(large_world.Place(**question))
        if "capability" in question:
            return compiled(Compiled(**question))
        if "next_tokens" in question:
            return {"graphs": graphs(Graphs(**question))}
        if "tensors" in question:
            return copied(Copied(**question))
        if "sequences" in question:
            return {"peak_bytes": peak_bytes(Recipe(**question))}
        return asdict(report(Case(**question)))
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
