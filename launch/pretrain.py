"""`cloze pretrain`: shards in, checkpoints and curves out."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from launch import runs
from launch.config import BatchArithmetic, DeepSpeedConfig, PretrainConfig
from launch.console import Console
from launch.environment import (
    Environment,
    bound_primitive_caches,
    device_type,
    job_end_time,
    keep_freed_pages,
    prepare_deepspeed,
    read_environment,
)
from launch.heartbeat import Heartbeat
from launch.preemption import StopRequest
from model.config import BertConfig
from pipeline.errors import UserError
from pipeline.manifest import Manifest

EXIT_COMPLETE = 0
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped early with a checkpoint, start again to continue


def check_data(data: Path, model: BertConfig) -> tuple[Manifest, BertConfig]:
    """The manifest, and the model with what the data decides filled in.

    Raises:
        UserError: vocabulary, length or tokenizer of shards and model do not match.
    """
    from pipeline.tokenizer import Tokenizer

    manifest = Manifest.load(data)
    if model.vocab_size not in (0, manifest.vocab_size):
        raise UserError(f"model.vocab_size: found {model.vocab_size}, expected {manifest.vocab_size}, the vocabulary "
                        f"of the shards in {data}; leave it at 0 to take theirs")
    found = Tokenizer.from_folder(data / runs.TOKENIZER).fingerprint
    if found != manifest.tokenizer_fingerprint:
        raise UserError(f"{data / runs.TOKENIZER}: found a tokenizer with fingerprint {found[:12]}, expected "
                        f"{manifest.tokenizer_fingerprint[:12]}, the one that made the shards; prepare the data again")
    if manifest.max_length > model.max_position_embeddings:
        raise UserError(f"model.max_position_embeddings: found {model.max_position_embeddings}, expected at least "
                        f"{manifest.max_length}, the max_length of the shards in {data}")
    return manifest, replace(model, vocab_size=manifest.vocab_size, pad_token_id=manifest.special_tokens.pad)


def print_facts(config: PretrainConfig, manifest: Manifest, engine, device, console: Console, world_size: int,
                parameters: int) -> None:
    """The table of derived facts at the start: what follows from the configuration, read off live objects."""
    from launch.devices import device_name, peak_flops
    from launch.engine import base_optimizer, compute_dtype, live_precision
    from launch.schedules import describe
    from model.flops import training_flops

    counts = manifest.splits["train"].counts
    tokens, samples = counts["tokens"], counts["samples"] // manifest.pair_sets  # an epoch goes over one set of pairs
    histogram = manifest.splits["train"].length_histogram
    squares = sum(length * length * number for length, number in enumerate(histogram))
    per_token = training_flops(config.model, (tokens, squares), manifest.masked_share * tokens, summed=True) / tokens
    steps_per_epoch = samples / config.train.global_batch_size
    at_most = "" if config.train.time_budget_hours is None else "at most "
    peak = peak_flops(device, compute_dtype(engine))
    console.facts(f"cloze pretrain -> {config.output}", [
        ("parameters", f"{parameters:,}"),
        ("FLOPs a token", f"{per_token / 1e6:,.1f} M, forward and backward"),
        ("batch", str(BatchArithmetic.of(config.train, world_size))),
        ("steps", f"{at_most}{config.train.max_steps:,} = {config.train.max_steps / steps_per_epoch:.2f} epochs of "
                  f"{steps_per_epoch:,.1f} steps ({samples:,} samples, {tokens:,} tokens)"),
        ("precision", live_precision(engine)),
        ("optimizer", f"{type(base_optimizer(engine)).__name__}, "
                      f"ZeRO stage {engine.zero_optimization_stage()}"),
        ("learning rate", f"{config.train.learning_rate:g} peak, {describe(config.schedule, config.train)}"),
        ("attention kernel", live_kernel(engine, device)),
        ("device", f"{world_size} x {device_name(device)}" + (f", {peak / 1e12:.3g} TFLOP/s peak" if peak else "")),
        ("MLM loss to beat", f"{manifest.unigram_entropy:.3f}, the unigram entropy of the training tokens"),
    ])


def live_kernel(engine, device) -> str:
    """Name of the attention kernel that training with this engine on this device uses."""
    import torch

    from launch.engine import compute_dtype
    from model.attention import select_kernel

    bert = engine.module.bert
    tokens = torch.empty(0, bert.config.hidden_size, dtype=compute_dtype(engine), device=device)
    return select_kernel(bert.attention_kernel, bert.config, tokens, True, False)


def pretrain(config: PretrainConfig) -> int:
    """Run or continue a pretraining; returns the exit status. Called by every process of the run."""
    environment = read_environment()
    prepare_deepspeed(environment)
    if device_type() == "cpu":
        keep_freed_pages()
        bound_primitive_caches()
    # Imported here and below: `cloze --help` must not wait for torch, and DeepSpeed wants a prepared environment.
    from launch import distributed
    from launch.engine import deepspeed_config
    from launch.probing import resolve

    console = Console(environment.is_main)
    deepspeed_config(config, environment.world_size)  # whatever is wrong in it is said before anything is written
    manifest, model = check_data(Path(config.data), config.model)
    config = replace(config, model=model, train=config.train.on(environment.world_size))
    runs.check_folder(config, runs.data_facts(manifest))
    deadline = None if config.train.stop_before_seconds is None else job_end_time() - config.train.stop_before_seconds
    with runs.locked(Path(config.output)) if environment.is_main else nullcontext():
        device = distributed.initialize(environment)
        with Heartbeat(Path(config.output), environment, config.monitor) as heartbeat:
            config = resolve(config, manifest, environment, device, console)
            trainer = prepare_trainer(config, manifest, environment, device, console, heartbeat)
            complete = train(config, trainer, StopRequest(deadline))
        distributed.shutdown()
    return say_end(trainer, complete)


def say_end(trainer, complete: bool) -> int:
    """Say how a run has ended; returns its exit status."""
    trainer.console.say(f"complete at step {trainer.state.step}: {trainer.completion}" if complete else
                        f"stopped with a checkpoint of step {trainer.saved_step}; the same command continues")
    return EXIT_COMPLETE if complete else EXIT_REQUEUE


def print_deepspeed_config(config: DeepSpeedConfig) -> None:
    """Print, as JSON, what a run of so many processes would give to DeepSpeed; nothing is started."""
    prepare_deepspeed(read_environment())
    from launch.engine import deepspeed_config

    print(json.dumps(deepspeed_config(config, config.processes), indent=1))


def build_model(config: PretrainConfig):
    """The model of the run with its initial weights."""
    from model.bert import BertForPreTraining
    from model.initialization import init_weights

    model = BertForPreTraining(config.model, attention_kernel=config.train.attention_kernel,
                               gradient_checkpointing=config.train.gradient_checkpointing)
    init_weights(model, config.seed)
    if config.train.compile:
        model.bert.encoder.compile_layers()
    return model


def prepare_trainer(config: PretrainConfig, manifest: Manifest, environment: Environment, device, console: Console,
                    heartbeat: Heartbeat):
    """Model, engine and trainer, at the step of the newest checkpoint if there is one; then the folder is described."""
    import torch

    from launch.checkpoint import CheckpointManager
    from launch.engine import build_engine, deepspeed_config
    from launch.evaluation import evaluate
    from launch.objectives import PretrainingObjective
    from launch.phases import Start
    from launch.profiling import StepProfiler
    from launch.trainer import Trainer
    from model.flops import num_parameters

    checkpoints = CheckpointManager(Path(config.output) / runs.CHECKPOINTS, environment, device,
                                    keep_last=config.checkpoint.keep_last, warn=console.warn)
    step = find_resume(config, checkpoints)
    elastic = step is not None and checkpoints.is_elastic(step)
    if elastic:
        console.say(f"step {step} was saved by another number of processes: converting it")
        checkpoints.convert(step)
    model = build_model(config)
    torch.manual_seed(config.seed)  # nothing here draws from it; whatever a library draws is then the same each time
    start = Start(config, manifest, model, checkpoints, console) if step is None and config.init_from else None
    parameters = num_parameters(model)  # before ZeRO-3 empties them
    made = deepspeed_config(config, environment.world_size, load_universal=start.elastic if start else elastic)
    engine = build_engine(model, config, made, device)
    print_facts(config, manifest, engine, device, console, environment.world_size, parameters)
    output = Path(config.output)
    objective = PretrainingObjective(config.train.loss_reduction)
    batches = validation(config, manifest, environment, console)
    trainer = Trainer(
        config, engine=engine, objective=objective,
        evaluate=None if batches is None else partial(evaluate, engine, objective, batches, device),
        flops=partial(micro_batch_flops, config.model),
        checkpoints=checkpoints, console=console, environment=environment, device=device, heartbeat=heartbeat,
        profiler=StepProfiler(output, config.monitor.profile_steps, environment.rank, device),
        facts={"zero_stage": config.zero.stage},
    )
    if start:
        start.finish(trainer, console)
    if step is not None:
        trainer.resume(step)
        console.say(f"resumed from step {step} of {config.train.max_steps}")
    if environment.is_main:
        save_tokenizer = partial(shutil.copytree, manifest.folder / runs.TOKENIZER)
        runs.describe(config, runs.data_facts(manifest), save_tokenizer, made)
    return trainer


def validation(config: PretrainConfig, manifest: Manifest, environment: Environment, console: Console):
    """What makes the validation batches of this rank, or None if no document was held out.

    Raises:
        UserError: something is to be decided by a validation that cannot be.
    """
    from pipeline.batches import evaluation_batches
    from pipeline.shards import ShardReader

    if not manifest.splits["validation"].counts.get("samples"):
        for name in ("keep_best", "patience", "target"):
            if getattr(config.evaluation, name):
                raise UserError(f"evaluation.{name}: found {getattr(config.evaluation, name)}, expected none: the "
                                f"validation split of {config.data} is empty; prepare the data with one")
        console.warn(f"{config.data}: the validation split is empty; nothing is evaluated")
        return None
    return partial(
        evaluation_batches, ShardReader(config.data, "validation"), micro_batch_size=config.train.micro_batch_size,
        rank=environment.rank, world_size=environment.world_size, max_samples=config.evaluation.samples,
    )


def train(config: PretrainConfig, trainer, stop: StopRequest) -> bool:
    """Feed the trainer from where it stands until it is complete (True) or was asked to stop (False)."""
    from pipeline.batches import BatchStream, BatchWarmup
    from pipeline.shards import ShardReader

    growing = config.train.initial_global_batch_size
    environment = trainer.environment
    stream = BatchStream(
        ShardReader(config.data, "train"), global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size, rank=environment.rank, world_size=environment.world_size,
        seed=config.seed, samples_consumed=trainer.state.samples_consumed, tokens_consumed=trainer.state.tokens,
        warmup=growing and BatchWarmup(growing, config.train.increment, config.train.batch_warmup_tokens),
    )
    try:
        return run(config, trainer, stream, stop, partial(showing, config, trainer) if trainer.evaluate else None)
    finally:
        stream.close()


def run(config, trainer, stream, stop: StopRequest, showing=None, report=None) -> bool:
    """Train until complete (True) or asked to stop (False), with the run's metrics, its status and its description.

    Args:
        showing: makes what each evaluation shows (Trainer.run) of rank 0's metrics writer (None elsewhere).
        report: what is done once no step is left, without which the run is not complete: given `stop`, whether it got
            to its end.
    """
    from launch import distributed
    from launch.metrics import MetricsWriter

    output = Path(config.output)
    main = trainer.environment.is_main
    metrics = MetricsWriter(output, trainer.state.step, trainer.state.evaluated_step) if main else None
    try:
        with stop:
            if metrics:
                runs.set_status(output, "running", trainer.state.step)
                metrics.describe(trainer.state.step, (output / runs.CONFIG).read_text(encoding="utf-8"),
                                 runs.flatten(asdict(config)))
            complete = trainer.run(stream, metrics, stop, showing and showing(metrics))
            complete = complete and (report is None or report(stop))
            if metrics:
                runs.set_status(output, "complete" if complete else "requeue", trainer.saved_step)
            # All leave together, and with signals still noted: torchrun ends the others as soon as one has left with
            # the status of a stop, and the templates go by what rank 0 has written.
            distributed.barrier()
    except BaseException:
        if metrics:
            with suppress(UserError):  # the disk may be full, which is then the error on its way
                runs.set_status(output, "failed", trainer.state.step)
        raise
    finally:
        if metrics:
            metrics.close()
    return complete


def showing(config: PretrainConfig, trainer, metrics):
    """What each evaluation shows beside its numbers: blanks and guesses, word embeddings."""
    from launch.engine import full_parameter
    from launch.examples import Examples
    from pipeline.shards import ShardReader
    from pipeline.tokenizer import Tokenizer

    reader = ShardReader(config.data, "validation")
    tokenizer = Tokenizer.from_folder(Path(config.data) / runs.TOKENIZER)
    count = min(config.monitor.examples, reader.num_samples)
    examples = count and Examples(trainer.engine, trainer.device, reader, tokenizer, count, metrics)

    def show(step: int) -> None:
        if examples:
            examples(step)
        if config.monitor.embeddings:
            table = full_parameter(trainer.engine, trainer.engine.module.bert.embeddings.word.weight)
            if metrics:
                names = [json.dumps(token)[1:-1] or "?" for token in tokenizer.tokens]  # no tabs, no line breaks
                metrics.embeddings(step, table[:len(names)], names)

    return show


def find_resume(config, checkpoints) -> int | None:
    """Step to go on from, agreed by all ranks, or None to start.

    Raises:
        UserError: checkpoint.resume demands or forbids one.
    """
    step = checkpoints.agree_on_latest()
    policy = config.checkpoint.resume
    if policy == "required" and step is None:
        raise UserError(f"checkpoint.resume: found no good checkpoint in {checkpoints.folder}, expected one since it "
                        "is `required`; use `auto` to start from scratch")
    if policy == "never" and checkpoints.steps():
        raise UserError(f"checkpoint.resume: found checkpoints in {checkpoints.folder}, expected none since it is "
                        "`never`; choose another --output or use `auto`")
    if step is None and checkpoints.steps():
        raise UserError(f"{checkpoints.folder}: every checkpoint there is damaged, expected a good one; restore one, "
                        "or choose another --output to start from scratch")
    if step is not None and step > config.train.max_steps:
        raise UserError(f"train.max_steps: found {config.train.max_steps}, expected at least {step}, the step of the "
                        f"newest checkpoint in {checkpoints.folder}")
    return step


def micro_batch_flops(config: BertConfig, micro_batch: dict) -> float:
    """Model FLOPs of a micro-batch, from its real lengths."""
    from model.flops import training_flops

    offsets = micro_batch["sequence_offsets"].long()
    lengths = offsets[1:] - offsets[:-1]
    sizes = int(offsets[-1]), int((lengths * lengths).sum())
    return training_flops(config, sizes, len(micro_batch["labels"]), summed=True)
