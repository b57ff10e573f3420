"""The parts that pretraining and fine-tuning runs share: start, resume, training loop, end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cloze.launch.checkpoint import CheckpointManager, StoredCheckpoints
from cloze.launch.config import BatchArithmetic, RunConfig
from cloze.launch.config.training import AUTO
from cloze.launch.engine.state import Engine, base_optimizer, compute_dtype, live_precision
from cloze.launch.run import runs
from cloze.launch.run.heartbeat import Heartbeat
from cloze.launch.run.metrics import MetricsWriter, tensorboard_command
from cloze.launch.run.preemption import EXIT_REQUEUE, StopRequest
from cloze.launch.run.stored import StoredRun
from cloze.launch.run.trackers import check_installed
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import choose_kernels, device_name, peak_flops
from cloze.launch.system.distributed import COLLECTIVE_SECONDS
from cloze.launch.system.environment import (
    Environment,
    device_type,
    job_end_time,
    keep_products_deterministic,
    record_collectives,
)
from cloze.launch.system.software import software
from cloze.launch.training.averaging import WeightAverage
from cloze.launch.training.callbacks import Callback
from cloze.launch.training.objective import SourceSums, TrainingObjective
from cloze.launch.training.profiling import StepProfiler
from cloze.launch.training.schedules import describe
from cloze.launch.training.trainer import Trainer
from cloze.model.attention import select_kernel
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url

# File for a rank's last collectives, beside its heartbeat, when a collective of NCCL times out; the rank is appended.
COLLECTIVES = "collectives-rank-"
EXIT_COMPLETE = 0
BUILDING = "building the model and DeepSpeed's engine"  # printed before a phase that may take long without output


@dataclass(frozen=True)
class Process:
    """This process of a run: its rank, device, console and heartbeat."""

    environment: Environment
    device: torch.device
    console: Console
    heartbeat: Heartbeat
    stored: StoredRun | None = None
    """The run in an object store that the folder stands for."""

    def shown(self, config: RunConfig) -> RunConfig:
        """The configuration with the output as the user gave it."""
        return _shown(config, self.stored)


def _shown(config: RunConfig, stored: StoredRun | None) -> RunConfig:
    return replace(config, output=str(stored.place)) if stored else config


@contextmanager
def joined(
    config: RunConfig, facts: runs.Facts, environment: Environment, console: Console, stored: StoredRun | None = None
) -> Iterator[tuple[Process, StopRequest]]:
    """Context in which this process holds the run's folder and has joined the process group; yields the Process and the
    StopRequest.

    Args:
        config: configuration of the run at this world size.
        facts: hashes of the inputs of the run, which must not change between starts (runs.check_folder).
        stored: the run in an object store, if the local output folder represents one.

    Raises:
        UserError: the folder holds another run, or another job uses it.
    """
    output = Path(config.output)
    runs.check_folder(config, facts, None if stored is None else str(stored.place))
    check_installed(config.monitor.trackers)
    if environment.world_size > 1 and config.monitor.hang_seconds >= COLLECTIVE_SECONDS:
        console.warn(
            f"monitor.hang_seconds: found {config.monitor.hang_seconds:g}; what hangs is not reported, since "
            f"collectives give up and end the run after {COLLECTIVE_SECONDS} s"
        )
    deadline = None if config.train.stop_before_seconds is None else job_end_time() - config.train.stop_before_seconds
    main = environment.is_main
    with runs.locked(output) if main else nullcontext(), runs.recording_failure(output) if main else nullcontext():
        fetch = stored.fetch_heartbeats if stored else None
        # reports a rank that doesn't join
        with Heartbeat(output, environment, config.monitor, fetch=fetch) as heartbeat:
            if config.train.deterministic:
                keep_products_deterministic()
            if device_type() == "cuda":
                record_collectives(output.absolute() / runs.HEARTBEATS / COLLECTIVES)
            device = distributed.initialize(environment)
            choose_kernels(device, tf32=config.train.tf32, deterministic=config.train.deterministic)
            heartbeat.beat(0, "start")
            yield Process(environment, device, console, heartbeat, stored), StopRequest(deadline, console.say)
        distributed.shutdown()


def exit_status(complete: bool) -> int:
    """Exit status of a run that is complete or was stopped early."""
    return EXIT_COMPLETE if complete else EXIT_REQUEUE


def open_checkpoints(
    config: RunConfig, facts: runs.Facts, process: Process
) -> tuple[CheckpointManager, int | None, bool]:
    """The run's checkpoints, the step to resume from (None: a new run), and whether it was saved at another world size.

    Args:
        facts: hashes of the inputs, which a resume compares (runs.check_folder).

    Raises:
        UserError: checkpoint.resume requires or forbids a checkpoint, all are damaged, or the newest good one belongs
        to another run.
    """
    folder, keep_last = Path(config.output) / runs.CHECKPOINTS, config.checkpoint.keep_last
    if process.stored:
        checkpoints: CheckpointManager = StoredCheckpoints(
            process.stored,
            folder,
            process.environment,
            process.device,
            keep_last=keep_last,
            say=process.console.say,
            warn=process.console.warn,
        )
    else:
        checkpoints = CheckpointManager(
            folder, process.environment, process.device, keep_last=keep_last, warn=process.console.warn
        )
    step = _find_resume(config, checkpoints)
    if step is None:
        return checkpoints, None, False
    runs.check_checkpoint(checkpoints.path(step), checkpoints.state(step), config, facts)
    elastic = checkpoints.is_elastic(step)
    if elastic:
        process.console.say(f"step {step} was saved by another number of processes: converting it")
        checkpoints.convert(step)
    return checkpoints, step, elastic


def _find_resume(config: RunConfig, checkpoints: CheckpointManager) -> int | None:
    """Step to resume from, agreed by all ranks, or None for a new run."""
    step = checkpoints.agree_on_latest()
    found = step is not None or bool(checkpoints.steps())
    some = distributed.from_main(found, checkpoints.device)  # as rank 0 sees the shared folder
    policy = config.checkpoint.resume
    if policy == "required" and step is None:
        raise UserError(
            f"checkpoint.resume: found no good checkpoint in {checkpoints.folder}, expected one since it "
            "is `required`; use `auto` to start from scratch"
        )
    if policy == "never" and some:
        raise UserError(
            f"checkpoint.resume: found checkpoints in {checkpoints.folder}, expected none since it is "
            "`never`; choose another --output or use `auto`"
        )
    if step is None and some:
        raise UserError(
            f"{checkpoints.folder}: found every checkpoint damaged, expected a good one; restore one, "
            "or choose another --output to start from scratch"
        )
    if step is not None and step > config.train.max_steps:
        raise UserError(
            f"train.max_steps: found {config.train.max_steps}, expected at least {step}, the step of the "
            f"newest checkpoint in {checkpoints.folder}"
        )
    return step


def make_trainer(
    config: RunConfig,
    process: Process,
    engine: Engine,
    checkpoints: CheckpointManager,
    *,
    facts: dict,
    objective: TrainingObjective,
    flops: Callable[[dict], float],
    more: dict | None = None,
    evaluate: Callable[[Callable[[], None]], dict[str, float]] | None = None,
    callbacks: Sequence[Callback] = (),
    sources: SourceSums | None = None,
    average: WeightAverage | None = None,
) -> Trainer:
    """A trainer at step 0.

    Args:
        facts: hashes of the inputs; saved in every checkpoint, with all fields that shape the result.
        more: additional plain values saved in every checkpoint.

    The other arguments are those of Trainer.
    """
    environment, device = process.environment, process.device
    profiler = StepProfiler(Path(config.output), config.monitor.profile_steps, environment.rank, device)
    return Trainer(
        config,
        engine=engine,
        checkpoints=checkpoints,
        console=process.console,
        environment=environment,
        device=device,
        heartbeat=process.heartbeat,
        profiler=profiler,
        facts={
            "zero_stage": config.zero.stage,
            "config_hash": runs.config_hash(config),
            "shaping": runs.shaping_of(config, facts),
            **facts,
            **(more or {}),
        },
        objective=objective,
        evaluate=evaluate,
        flops=flops,
        callbacks=callbacks,
        sources=sources,
        average=average,
    )


def resume(trainer: Trainer, step: int | None) -> None:
    """Load the checkpoint of a step into the trainer; does nothing for None."""
    if step is not None:
        trainer.resume(step)
        trainer.console.say(f"resumed from step {step} of {trainer.train.max_steps}")


def origin_of_rate(given: float | str, size: int) -> str:
    """How the peak learning rate was chosen, in words.

    Args:
        given: the user's value, or auto.
        size: parameters of the encoder's layers.
    """
    if given != AUTO:
        return "as given"
    count = f"{size / 1e6:,.1f} million" if size >= 1e5 else f"{size:,}"
    return f"by the model's size ({count} parameters in its layers); --train.learning_rate sets another"


def training_facts(
    config: RunConfig, process: Process, engine: Engine, epochs: str, rate: str = ""
) -> list[tuple[str, str]]:
    """Rows of the table printed at the start, read from the engine and the trainer.

    Args:
        epochs: length of the run in epochs, in words.
        rate: how the peak rate was chosen; empty: printed already.
    """
    train, world_size = config.train, process.environment.world_size
    at_most = "" if train.time_budget_hours is None else "at most "
    peak = peak_flops(process.device, compute_dtype(engine))
    return [
        ("batch", str(BatchArithmetic.of(train, world_size))),
        ("steps", f"{at_most}{train.max_steps:,} = {epochs}"),
        ("precision", live_precision(engine)),
        ("optimizer", f"{type(base_optimizer(engine)).__name__}, ZeRO stage {engine.zero_optimization_stage()}"),
        (
            "learning rate",
            f"{train.learning_rate:g} peak, {describe(config.schedule, train)}"
            + (f"; the peak {rate}" if rate else ""),
        ),
        (
            "attention kernel",
            _live_kernel(engine, process.device) + (", compiled layers" if engine.module.bert.encoder.compiled else ""),
        ),
        (
            "device",
            f"{world_size} x {device_name(process.device)}" + (f", {peak / 1e12:.3g} TFLOP/s peak" if peak else ""),
        ),
        ("curves", _curves_command(process.shown(config).output)),
    ]


def _curves_command(output: str) -> str:
    """The command that shows the run's curves; of a run in a store it fetches them."""
    return f"cloze status {output} --curves FOLDER" if is_url(output) else tensorboard_command(Path(output))


def _live_kernel(engine: Engine, device: torch.device) -> str:
    """Name of the attention kernel that training with this engine on this device uses."""
    bert = engine.module.bert
    tokens = torch.empty(0, bert.config.hidden_size, dtype=compute_dtype(engine), device=device)
    return select_kernel(bert.attention_kernel, bert.config, tokens, False)


@dataclass
class Record:
    """The record of a run in progress: its metrics, and whether it is complete."""

    metrics: MetricsWriter | None
    """On rank 0."""
    complete: bool = False
    """Whether all steps and the work after the last one are done; set by the caller."""


@contextmanager
def recorded(
    config: RunConfig, trainer: Trainer, stop: StopRequest, stored: StoredRun | None = None
) -> Iterator[Record]:
    """Context around training that writes the run's metrics, description and status; the final status follows from
    `complete` of the record.

    Args:
        stop: entered within this context.
        stored: the run in an object store, if the folder represents one.
    """
    output, shown = Path(config.output), _shown(config, stored)
    main = trainer.environment.is_main
    record = Record(_metrics_writer(output, shown, trainer) if main else None)
    metrics = record.metrics
    try:
        with stop:
            if metrics:
                runs.set_status(output, "running", trainer.state.step)
                if stored:
                    stored.begin(trainer.state.step, trainer.state.evaluated_step)
                metrics.describe(
                    trainer.state.step, (output / runs.CONFIG).read_text(encoding="utf-8"), runs.flatten(asdict(shown))
                )
            yield record
            if metrics:
                runs.set_status(output, "complete" if record.complete else "requeue", trainer.saved_step)
                if stored:  # before the barrier: torchrun may end this process as soon as another one exits
                    stored.ship_last(partial(trainer.heartbeat.beat, trainer.state.step, "save"))
            trainer.console.say(
                f"complete at step {trainer.state.step}: {trainer.completion}"
                if record.complete
                else f"stopped with a checkpoint of step {trainer.saved_step}; the same command continues"
            )
            # All ranks leave together, with signals still recorded: torchrun ends the others as soon as one exits with
            # the status of a stop, and rank 0 must have written the status that the job templates read and printed its
            # last line.
            distributed.barrier()
    finally:
        if metrics:
            metrics.close(record.complete)


def _metrics_writer(output: Path, config: RunConfig, trainer: Trainer) -> MetricsWriter:
    """The MetricsWriter of a run that begins at the trainer's step; trackers get its configuration, data and
    software.
    """
    facts = runs.flatten(asdict(config)) | runs.read_fields(output / runs.DATA)
    facts |= {f"software.{name}": value for name, value in software().items()}
    facts |= {
        "hardware.device": device_name(trainer.engine.device),
        "hardware.processes": trainer.environment.world_size,
    }
    return MetricsWriter(
        output,
        trainer.state.step,
        trainer.state.evaluated_step,
        config.evaluation.metric,
        config.monitor.trackers,
        config.monitor.project,
        facts,
        trainer.tracked,
    )
