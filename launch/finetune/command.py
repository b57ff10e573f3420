"""`cloze finetune`: trains a pretrained model on a task and writes the model, its metrics and its predictions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cloze.launch.config import FinetuneConfig
from cloze.launch.engine.building import build_engine
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.engine.state import Engine, compute_dtype
from cloze.launch.finetune import scoring
from cloze.launch.finetune.contrastive import ContrastiveObjective
from cloze.launch.finetune.examples.base import ExampleStream
from cloze.launch.finetune.examples.contrastive import ContrastiveExamples
from cloze.launch.finetune.features import encode_once
from cloze.launch.finetune.job import Job, read_job
from cloze.launch.finetune.models import freeze, start_model, unfreezing
from cloze.launch.finetune.objective import FinetuningObjective
from cloze.launch.finetune.reporting import Evaluation, report, where
from cloze.launch.finetune.sweep import sweep
from cloze.launch.run import runs
from cloze.launch.run.stored import stored
from cloze.launch.system.console import Console
from cloze.launch.system.environment import Environment
from cloze.launch.training import running
from cloze.launch.training.objective import TrainingObjective
from cloze.launch.training.running import Process
from cloze.launch.training.trainer import Trainer
from cloze.model.config import BertConfig
from cloze.model.flops import TokenCounts, num_parameters, training_flops
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import RankBatch
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.tokenization.tokenizer import copy_tokenizer


def finetune(config: FinetuneConfig, environment: Environment) -> int:
    """Run or resume a fine-tuning; returns the exit status. Called by every process of the run with the result of
    `prepare_process`.
    """
    if config.seeds > 1 or config.grid:
        if is_url(config.output):
            raise UserError(
                f"output: found {config.output} with several runs (seeds, grid), expected a folder, where "
                "they are compared; one run by itself goes to an object store"
            )
        if environment.world_size > 1:
            raise UserError(
                f"seeds, grid: found them in a run of {environment.world_size} processes, expected one "
                "process, which starts a run on each GPU; leave torchrun out"
            )
        return sweep(config, read_job)
    scoring.check_installed()
    console = Console(environment.is_main)
    console.say("reading the model and the examples")
    job = read_job(config)
    # errors in the configuration are raised before anything is written
    deepspeed_config(job.config, environment.world_size)
    job = replace(job, config=replace(job.config, train=job.config.train.on(environment.world_size)))
    # `run`: the run in a store, if the output is one; the configuration then has a local folder.
    with stored(job.config, environment, console) as (config, run):
        job = replace(job, config=config)
        _warn_of_length(job, console)
        with running.joined(config, job.facts, environment, console, run) as (process, stop):
            trainer, evaluation, learned = prepare_trainer(job, process)
            with running.recorded(config, trainer, stop, run) as record:
                stepped = trainer.run(
                    open_stream(learned, trainer), record.metrics, stop, evaluation.showing(record.metrics)
                )
                record.complete = stepped and report(job, trainer, run, stop)
        if record.complete:
            for line in where(config, job.task, run):
                console.say(line)
            if run:
                run.clear()
        return running.exit_status(record.complete)


def _warn_of_length(job: Job, console: Console) -> None:
    known, config = job.source.trained_length, job.config
    if known and known < min(config.lengths[0], job.train.longest):
        console.warn(
            f"max_length: found {config.max_length}, more than the {known} tokens that {config.model} "
            "was trained on: its further positions are trained on these examples only; pretrain a phase of "
            f"that length, or give --max_length {known}"
        )


def prepare_trainer(job: Job, process: Process) -> tuple[Trainer, Evaluation, Job]:
    """Build the trainer (with the newest checkpoint if there is one), the evaluation, and the job with its training
    examples; write the run's description.
    """
    config, environment = job.config, process.environment
    checkpoints, step, elastic = running.open_checkpoints(config, job.facts, process)
    if step is not None:  # the source's newest checkpoint may be another one than at the first start
        job = replace(job, source=replace(job.source, step=checkpoints.state(step).get("model_step")))
    process.console.say(running.BUILDING)
    torch.manual_seed(config.seed)  # our code does not use the global generator; seeded for libraries that do
    model, origin = start_model(job.architecture, job.source, job.head, config)
    count = num_parameters(model)
    freeze(model, config.freeze)
    parameters = f"{count:,}, of which {num_parameters(model):,} learn"
    made = deepspeed_config(config, environment.world_size, load_universal=elastic)
    engine = build_engine(model, config, made, process.device)
    _print_facts(job, process, engine, [("parameters", parameters), ("weights", origin)])
    trainer = running.make_trainer(
        config,
        process,
        engine,
        checkpoints,
        facts=job.facts,
        more={"model_step": job.source.step},
        objective=_objective(job, environment.rank),
        evaluate=Evaluation(job, engine, environment, process.device),
        flops=partial(_flops, model.config),
    )
    running.resume(trainer, step)
    learned = _with_features(job, engine, process)  # with the weights after the resume
    trainer.evaluate = evaluation = Evaluation(learned, engine, environment, process.device)
    if environment.is_main:
        runs.describe(
            Path(config.output), process.shown(config), job.facts, partial(copy_tokenizer, job.source.tokenizer), made
        )
    return trainer, evaluation, learned


def _objective(job: Job, rank: int) -> TrainingObjective:
    if isinstance(job.train, ContrastiveExamples):
        return ContrastiveObjective(job.config.embedding, job.train.group_size, rank)
    return FinetuningObjective(job.train)


def _with_features(job: Job, engine: Engine, process: Process) -> Job:
    """The job with cached features of the frozen encoder in place of its training and validation examples.
    Collective.
    """
    if job.config.freeze != "encoder":
        return job
    device, beat = process.device, partial(process.heartbeat.beat, 0, "compute")
    began = time.perf_counter()
    engine.module.eval()
    with torch.autocast(device.type, compute_dtype(engine), enabled=engine.torch_autocast_enabled()):
        train, validation = (
            encode_once(
                engine.module.features, examples, job.config.train.micro_batch, process.environment, device, beat
            )
            for examples in (job.train, job.validation)
        )
    engine.module.train()
    process.console.say(
        f"the encoder has run over {len(job.train) + len(job.validation):,} examples once, in "
        f"{time.perf_counter() - began:.1f} s; only the head is trained from here on"
    )
    return replace(job, train=train, validation=validation)


def _flops(shape: BertConfig, micro_batch: dict) -> float:
    """Model FLOPs of a micro-batch, from its real lengths; heads are neglected (below a thousandth)."""
    if "features" in micro_batch:
        return 0.0
    return training_flops(shape, replace(TokenCounts.of_micro_batch(micro_batch), masked=0))


def _print_facts(job: Job, process: Process, engine: Engine, rows: list[tuple[str, str]]) -> None:
    config = job.config
    names = job.head.labels if job.head else ()
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    assert config.train.max_steps is not None, "read_job has counted them"
    epochs = f"{config.train.max_steps * config.train.global_batch_size / len(job.train):.2f} epochs"
    process.console.facts(
        f"cloze finetune {config.task} -> {process.shown(config).output}",
        [
            *rows,
            *([("labels", f"{len(names)}: {shown}")] if names else []),
            ("metrics", job.validation.measured),
            *((f"{examples.name}", examples.facts) for examples in (job.train, job.validation, *job.test)),
            *running.training_facts(config, process, engine, epochs, job.rate),
        ],
    )


def open_stream(job: Job, trainer: Trainer) -> Iterator[RankBatch]:
    """This rank's batches from the trainer's position on."""
    config, environment = job.config, trainer.environment
    stream = ExampleStream(
        job.train,
        config.train.global_batch_size,
        config.train.micro_batch,
        environment.rank,
        environment.world_size,
        config.seed,
        trainer.state.samples_consumed,
    )
    batches = iter(stream)
    if config.unfreeze_every_epochs is not None:
        each = max(1, round(config.unfreeze_every_epochs * len(job.train) / config.train.global_batch_size))
        batches = unfreezing(batches, trainer.engine.module, trainer.state.step, each)
    return batches
