"""`cloze pretrain`: trains on prepared shards, writes checkpoints and curves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cloze.launch.config import DeepSpeedConfig, PretrainConfig
from cloze.launch.config.training import AUTO
from cloze.launch.engine.building import build_engine
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.engine.state import Engine, full_parameter
from cloze.launch.pretrain.data import (
    TrainingData,
    batch_warmup,
    cache_facts,
    check_alike,
    check_data,
    open_cache,
    open_data,
    open_split,
    open_training,
    read_once,
    run_masking,
)
from cloze.launch.pretrain.device_defaults import differences, facts_of, resolve_compile
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.table import make_objective, objective_facts
from cloze.launch.pretrain.phases import Start
from cloze.launch.pretrain.probing import resolve
from cloze.launch.pretrain.sample_predictions import SamplePredictions
from cloze.launch.pretrain.sources import Sources
from cloze.launch.run import runs
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.stored import stored
from cloze.launch.system.console import Console
from cloze.launch.system.devices import take_flash_attention_3
from cloze.launch.system.environment import Environment
from cloze.launch.system.own_classes import make, own_class
from cloze.launch.training import running
from cloze.launch.training.averaging import WeightAverage
from cloze.launch.training.callbacks import Callback
from cloze.launch.training.evaluation import ValidationSet, evaluate_sets
from cloze.launch.training.running import Process
from cloze.launch.training.trainer import Trainer
from cloze.model.bert import BertPreTrained
from cloze.model.encoder import Encoder
from cloze.model.flops import TokenCounts, encoder_weights, num_parameters
from cloze.model.initialization import init_weights, init_word_embeddings
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import BatchStream, evaluation_batches
from cloze.pipeline.loading.order import choose_streams
from cloze.pipeline.shards.shards import ShardReader
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.stores.places import to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def pretrain(config: PretrainConfig, environment: Environment) -> int:
    """Run or resume a pretraining; returns the exit status. Called by every process of the run with the result of
    `prepare_process`.
    """
    # errors in the configuration are raised before anything is written
    deepspeed_config(config, environment.world_size)
    console = Console(environment.is_main)
    # `run`: the run in a store, if the output is one; the configuration then has a local folder.
    with stored(config, environment, console) as (config, run), read_once(config, environment):
        resolved = resolve_run(config, environment.world_size)
        _report_decisions(config, resolved, console)
        with running.joined(resolved.config, resolved.facts, environment, console, run) as (process, stop):
            config, data, objective, callbacks, facts = resolve_on_device(resolved, process)
            trainer = prepare_trainer(config, data, process, objective, callbacks, facts)  # loads the newest checkpoint
            with (
                closing(open_stream(config, data, trainer)) as stream,
                running.recorded(config, trainer, stop, run) as record,
            ):
                show = showing(config, data, trainer, record.metrics) if trainer.evaluate else None
                record.complete = trainer.run(stream, record.metrics, stop, show)
        if run and record.complete:
            run.clear()
        return running.exit_status(record.complete)


def _report_decisions(given: PretrainConfig, resolved: ResolvedRun, console: Console) -> None:
    if given.train.learning_rate == AUTO:
        size = encoder_weights(resolved.config.model)
        console.say(f"peak rate: {resolved.config.train.learning_rate:g}, {running.origin_of_rate(AUTO, size)}")
    for manifest in resolved.data.manifests:
        if manifest.remark:
            console.warn(manifest.remark)


def resolve_on_device(resolved: ResolvedRun, process: Process) -> ResolvedRun:
    """The run with the choices that depend on the device: kernels, compilation, micro-batch size. Collective."""
    config, data, objective, device = resolved.config, resolved.data, resolved.objective, process.device
    if why := take_flash_attention_3(device, config.model.attention_probs_dropout_prob):
        process.console.warn(f"flash attention 3 is installed and cannot be used ({why}); version 2 computes")
    config = resolve_compile(config, device, process.console)
    config = resolve(
        config, data, objective, partial(build_model, config, objective), process.environment, device, process.console
    )
    return resolved._replace(config=config)


class ResolvedRun(NamedTuple):
    """A run whose configuration is complete, except for the choices that depend on the device."""

    config: PretrainConfig
    data: TrainingData
    objective: Objective
    callbacks: list[Callback]
    facts: runs.Facts
    """What it reads, for comparison with an earlier part of the run."""


def resolve_run(config: PretrainConfig, world_size: int) -> ResolvedRun:
    """Complete the configuration from the inputs of the run, and check it; nothing is written.

    Raises:
        UserError: the configuration is wrong, or does not fit the data.
    """
    data, model = open_data(config)
    run_masking(config, data)  # also checks that masking.* is not set for shards that hold their masks
    config = replace(config, model=model, train=config.train.on(world_size).for_size(encoder_weights(model)))
    config = replace(config, data_streams=choose_data_streams(config, world_size))
    objective = make_objective(config)
    return ResolvedRun(config, data, objective, make_callbacks(config), {**data.facts, **objective_facts(objective)})


def make_callbacks(config: PretrainConfig) -> list[Callback]:
    """The callbacks that the configuration names. Raises UserError as `own_class`."""
    return [make("callbacks", name, own_class("callbacks", name, Callback), config, {}) for name in config.callbacks]


def choose_data_streams(config: PretrainConfig, world_size: int) -> int:
    """The number of data streams of the run: as given, as in its earlier starts, or by the batch sizes.

    Raises:
        UserError: its earlier starts had none.
    """
    sizes = list(config.train.batch_sizes.values())
    saved = runs.saved_data_streams(Path(config.output), config.checkpoint.accept_changes)
    if config.data_streams:
        return config.data_streams
    if saved is not None and not any(size % saved for size in sizes):  # otherwise the batch size has changed
        return saved
    return choose_streams(sizes, world_size, len(config.sources))


def print_deepspeed_config(config: DeepSpeedConfig, environment: Environment) -> None:
    """Print DeepSpeed's configuration for a run as JSON; nothing is started."""
    if config.train.micro_batch_size in (AUTO, None):
        Console().warn(
            f"train.micro_batch_size: found {config.train.micro_batch_size or 'null'}, which a run finds "
            "out on its device; the numbers of sequences and of accumulation steps below stand in for it"
        )
    print(json.dumps(deepspeed_config(config, config.processes), indent=1))


def build_model(config: PretrainConfig, objective: Objective | None = None) -> BertPreTrained:
    """The model of the run with its initial weights.

    Args:
        objective: the objective; None: the one that the configuration names.

    Raises:
        UserError: the objective's model is not one that a run can train.
    """
    objective = objective or make_objective(config)
    model = objective.build_model()
    if not isinstance(model, BertPreTrained):
        raise UserError(
            f"objective: found a {type(model).__name__} made by {type(objective).__name__}.build_model, "
            "expected a subclass of cloze.model.bert.BertPreTrained"
        )
    init_weights(model, config.seed)
    if config.train.compile:
        for module in model.modules():
            if isinstance(module, Encoder):
                module.compile_layers()
    return model


def take_word_vectors(path: Path, tokenizer: Tokenizer, model: BertPreTrained, console: Console) -> None:
    """Copy word vectors from a file (`init_word_vectors`) into a newly initialized model; tokens without a vector keep
    theirs.

    Raises:
        UserError, ModelError: there is no such file, it contains none of the tokens, or its vectors do not have the
            width of the model's embeddings.
    """
    tokens = tokenizer.tokens
    numbers = {token: number for number, token in enumerate(tokens) if token and number != model.config.pad_token_id}
    with readable_errors(path):
        found = init_word_embeddings(model, path, numbers)
    console.say(f"init_word_vectors: {found:,} of {len(numbers):,} tokens start from {path}")


def prepare_trainer(
    config: PretrainConfig,
    data: TrainingData,
    process: Process,
    objective: Objective,
    callbacks: Sequence[Callback],
    facts: runs.Facts,
) -> Trainer:
    """Build model, engine and trainer, load the newest checkpoint if there is one, and write the run's description."""
    environment, console = process.environment, process.console
    checkpoints, step, elastic = running.open_checkpoints(config, facts, process)
    console.say(running.BUILDING)
    model = build_model(config, objective)
    torch.manual_seed(config.seed)  # our code does not use the global generator; seeded for libraries that do
    if step is None and config.init_word_vectors:
        take_word_vectors(
            Path(config.init_word_vectors), Tokenizer.from_folder(data.manifest.folder / runs.TOKENIZER), model, console
        )
    start = Start(config, data.manifest, model, checkpoints, console) if step is None and config.init_from else None
    parameters = num_parameters(model)  # before ZeRO-3 partitions the parameters
    made = deepspeed_config(config, environment.world_size, load_universal=start.elastic if start else elastic)
    engine = build_engine(model, config, made, process.device)
    _print_facts(config, data, objective, process, engine, parameters)
    sets = validation_sets(config, data, process)
    trainer = running.make_trainer(
        config,
        process,
        engine,
        checkpoints,
        facts={**facts, "data_streams": config.data_streams},
        objective=objective,
        evaluate=partial(evaluate_sets, engine, objective, sets, process.device) if sets else None,
        flops=lambda micro_batch: objective.flops(TokenCounts.of_micro_batch(micro_batch)),
        callbacks=callbacks,
        average=None if config.ema.decay is None else WeightAverage(engine, config.ema.decay, config.ema.warmup),
        sources=Sources(data, config.streams, objective.pretraining_output) if data.names else None,
    )
    if start:
        start.finish(trainer, console)
    running.resume(trainer, step)
    decided, output = facts_of(config, process.device), Path(config.output)
    if step is not None and (changed := differences(config, runs.device_facts(output), decided)):
        console.warn(changed)
    if environment.is_main:
        runs.keep_device_facts(output, decided)
        # Its folder is on this machine, fetched if necessary.
        tokenizer = Tokenizer.from_folder(data.manifest.folder / runs.TOKENIZER).folder
        assert isinstance(tokenizer, Path), tokenizer
        runs.describe(output, process.shown(config), facts, partial(shutil.copytree, tokenizer), made)
    return trainer


def _millions(count: float) -> str:
    """In millions, with four digits at least."""
    return f"{count / 1e6:,.1f}" if count >= 1e9 else f"{count / 1e6:.4g}"


def _print_facts(
    config: PretrainConfig, data: TrainingData, objective: Objective, process: Process, engine: Engine, parameters: int
) -> None:
    tokens, samples = data.num_tokens, data.num_samples
    histogram = data.length_histogram
    lengths = np.arange(len(histogram))
    size, squares = float(lengths @ histogram), float(lengths**2 @ histogram)
    masking = run_masking(config, data)
    next_tokens = masking.next_tokens_until / (config.train.max_steps * config.train.global_batch_size)
    predicted = next_tokens + (1 - next_tokens) * data.most_masked(masking)
    per_token = objective.flops(TokenCounts(size, squares, predicted * size)) / size
    steps_per_epoch = samples / config.train.global_batch_size
    epochs = (
        f"{config.train.max_steps / steps_per_epoch:.2f} epochs of {steps_per_epoch:,.1f} steps "
        f"({samples:,} samples, {tokens:,} tokens)"
    )
    entropies = ", ".join(
        f"{name} {manifest.unigram_entropy:.3f}".lstrip()
        for name, manifest in zip(data.names or ("",), data.manifests, strict=True)
    )
    process.console.facts(
        f"cloze pretrain -> {process.shown(config).output}",
        [
            ("parameters", f"{parameters:,}"),
            ("FLOPs a token", f"{_millions(per_token)} M, forward and backward"),
            *data.described(),
            *running.training_facts(config, process, engine, epochs),
            *cache_facts(config, data),
            ("MLM loss to beat", f"{entropies}, the unigram entropy of the training tokens"),
        ],
    )


def validation_sets(config: PretrainConfig, data: TrainingData, process: Process) -> list[ValidationSet]:
    """The validation sets: of the run's data, and `evaluation.sets`; empty if no document was held out. Collective.

    Raises:
        UserError: a set has another tokenizer, a field needs a validation split that is empty, or a masking rate is
        given although all shards hold their masks.
    """
    folders = [(name, manifest, True) for name, manifest in zip(data.names or (None,), data.manifests, strict=True)]
    for name, path in config.evaluation.sets.items():
        folders.append((name, check_data(to_place(path), config.model, config.train.sequence_length)[0], False))
        check_alike([data.manifest], folders[-1][1], "evaluation.sets")
    folders = [each for each in folders if each[1].splits["validation"].counts.get("samples")]
    if not folders:
        for name in ("keep_best", "patience", "target"):
            if getattr(config.evaluation, name):
                raise UserError(
                    f"evaluation.{name}: found {getattr(config.evaluation, name)}, expected none: the "
                    f"validation split of {data.manifest.folder} is empty; prepare the data with one"
                )
        process.console.warn(f"{data.manifest.folder}: the validation split is empty; nothing is evaluated")
    rate = config.evaluation.masking_rate
    if rate is not None and folders and all(manifest.mask_sets for _, manifest, _ in folders):
        raise UserError(
            f"evaluation.masking_rate: found {rate} with shards in {folders[0][1].folder} that hold their "
            "masks, expected null; or prepare them with --masking.mode dynamic"
        )
    environment = process.environment
    pooled = any(own for *_, own in folders)  # only the additional sets, if the data has no validation split
    return [
        ValidationSet(
            name,
            own or not pooled,
            partial(
                evaluation_batches,
                open_split(config, manifest.folder, "validation", environment, process.device),
                micro_batch_size=config.train.micro_batch,
                rank=environment.rank,
                world_size=environment.world_size,
                max_samples=config.evaluation.samples,
                segments=config.model.segments,
                rate=rate,
            ),
        )
        for name, manifest, own in folders
    ]


def open_stream(config: PretrainConfig, data: TrainingData, trainer: Trainer) -> BatchStream:
    """This rank's batches from the trainer's position on."""
    environment = trainer.environment
    return BatchStream(
        open_training(config, data, environment, trainer.device),
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch,
        rank=environment.rank,
        world_size=environment.world_size,
        streams=config.streams,
        seed=config.seed,
        samples_consumed=trainer.state.samples_consumed,
        warmup=batch_warmup(config, data),
        segments=config.model.segments,
        masking=run_masking(config, data),
    )


def showing(
    config: PretrainConfig, data: TrainingData, trainer: Trainer, metrics: MetricsWriter | None
) -> Callable[[int], None]:
    """A function that each evaluation calls to show predictions for masked tokens (of a mixture's first source with
    held-out samples) and word embeddings.
    """
    readers = [
        ShardReader(manifest.folder, "validation", check_sizes=False, cache=open_cache(config, manifest.folder))
        for manifest in data.manifests
    ]
    reader = max(readers, key=lambda each: each.num_samples > 0)
    tokenizer = Tokenizer.from_folder(data.manifest.folder / runs.TOKENIZER)
    count = min(config.monitor.examples, reader.num_samples)
    guesses = count and SamplePredictions(
        trainer.engine, trainer.device, reader, tokenizer, count, config.model.segments, metrics
    )

    def show(step: int) -> None:
        if guesses:
            guesses(step)
        if config.monitor.embeddings:
            table = full_parameter(trainer.engine, trainer.engine.module.bert.embeddings.word.weight)
            if metrics:
                names = [json.dumps(token)[1:-1] or "?" for token in tokenizer.tokens]  # no tabs, no line breaks
                metrics.embeddings(step, table[: len(names)], names)

    return show
