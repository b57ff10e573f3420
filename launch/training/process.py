"""A process of a training run: how it joins the others, and what it records until its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cloze.launch.checkpoint.completion import completion
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.config import RunConfig
from cloze.launch.run import integrity, runs
from cloze.launch.run.description import describe_again, description_of
from cloze.launch.run.heartbeat import Heartbeat
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.preemption import STOPPING, StopRequest
from cloze.launch.run.resume_check import check_folder
from cloze.launch.run.run_locks import locked
from cloze.launch.run.status_file import recording_failure, set_status
from cloze.launch.run.stored_run import StoredRun
from cloze.launch.run.trackers import check_installed
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import choose_kernels, device_name
from cloze.launch.system.distributed import COLLECTIVE_SECONDS
from cloze.launch.system.environment.gpus import device_type
from cloze.launch.system.environment.launchers import Environment, job_end_time
from cloze.launch.system.environment.process import keep_products_deterministic, record_collectives
from cloze.launch.system.software import software
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# File for a rank's last collectives, beside its heartbeat, when a collective of NCCL times out; the rank is appended.
COLLECTIVES = "collectives-rank-"
# Entries of a checkpoint's state.json: state of the trackers (run/trackers.py), and the lines of metrics.jsonl.
TRACKERS = "trackers"
LINES = "metrics_lines"


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
        return replace(config, output=str(self.stored.place)) if self.stored else config


@contextmanager
def joined(
    config: RunConfig, facts: runs.Facts, environment: Environment, console: Console, stored: StoredRun | None = None
) -> Iterator[tuple[Process, StopRequest]]:
    """Context in which this process holds the run's folder and has joined the process group; yields the Process and the
    StopRequest.

    Args:
        config: configuration of the run at this world size.
        facts: hashes of the inputs of the run, which must not change between starts (check_folder).
        stored: the run in an object store, if the local output folder represents one.

    Raises:
        UserError: the folder holds another run, or another job uses it.
    """
    output = Path(config.output)
    shown = None if stored is None else str(stored.place)
    check_folder(config, facts, shown)  # before anything is written to a folder that is no run's
    check_installed(config.monitor.trackers)
    if environment.world_size > 1 and config.monitor.hang_seconds >= COLLECTIVE_SECONDS:
        console.warn(
            f"monitor.hang_seconds: found {config.monitor.hang_seconds:g}; what hangs is not reported, since "
            f"collectives give up and end the run after {COLLECTIVE_SECONDS} s"
        )
    deadline = None if config.train.stop_before_seconds is None else job_end_time() - config.train.stop_before_seconds
    main = environment.is_main
    with locked(output) if main else nullcontext(), recording_failure(output) if main else nullcontext():
        if main:
            check_folder(config, facts, shown)  # another command may have held it until now
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
            try:
                yield Process(environment, device, console, heartbeat, stored), StopRequest(deadline, console.say)
            except BaseException:
                # The next run of this process would find the group; several ranks end with their own lines first.
                if environment.world_size == 1:
                    distributed.shutdown()
                raise
        distributed.shutdown()


@dataclass
class Record:
    """The record of a run in progress: its metrics, and whether it is complete."""

    metrics: MetricsWriter | None
    """The writer of metrics; None on other ranks than 0."""
    describe_again: Callable[[], None]
    """Writes what has vanished of the run's description, which its last work and the next start read."""
    complete: bool = False
    """Whether all steps and the work after the last one are done; set by the caller."""

    def last(self, work: Callable[[], bool]) -> bool:
        """Do the work after the last step, which may read the run's description; returns what it returns."""
        self.describe_again()
        return work()


@contextmanager
def recorded(
    config: RunConfig,
    progress: TrainProgress,
    process: Process,
    stop: StopRequest,
    kept: Fields,
    checkpoints: CheckpointManager,
) -> Iterator[Record]:
    """Context around training that writes the run's metrics, description and status; the final status follows from
    `complete` of the record.

    Args:
        stop: entered within this context.
        kept: the content of state.json of the checkpoint that the run goes on from; empty for a new run.
        checkpoints: of the run.

    Raises:
        UserError: the run is complete, but its files are not there any more.
    """
    output, shown, stored = Path(config.output), process.shown(config), process.stored
    metrics = _metrics_writer(output, shown, progress, process, kept) if process.environment.is_main else None
    description = description_of(output) if metrics else {}
    # Of a run in a store the folder is a copy, whose losses are of no consequence.
    warn = process.console.warn if stored is None else lambda _: None
    record = Record(metrics, partial(describe_again, output, description, warn))
    try:
        with stop:
            process.console.on_lost_reader(stop.lose_reader)
            step = progress.state.step
            if metrics:
                set_status(output, "running", step)
                if stored:
                    stored.begin(step, progress.state.evaluated_step)
                metrics.describe(step, (output / runs.CONFIG).read_text(encoding="utf-8"), runs.flatten(asdict(shown)))
            yield record
            there = not metrics or _look(output, record, checkpoints, process)
            if metrics:
                set_status(output, "complete" if record.complete else "requeue", progress.saved_step)
                if stored:  # before the barrier: torchrun may end this process as soon as another one exits
                    stored.ship_last(partial(process.heartbeat.beat, progress.state.step, "save"))
            if not record.complete:
                _say_who_asked(stop, process)
            if record.complete:
                process.console.say(f"complete at step {progress.state.step}: {completion(config, progress.state)}")
            elif there:
                process.console.say(
                    f"stopped with a checkpoint of step {progress.saved_step}; the same command continues"
                )
            else:
                process.console.say(f"stopped at step {progress.saved_step}; see the warnings, then repeat the command")
            # All ranks leave together, with signals still recorded: torchrun ends the others as soon as one exits with
            # the status of a stop, and rank 0 must have written the status that the job templates read and printed its
            # last line.
            distributed.barrier()
    except UserError:
        record.describe_again()
        raise
    finally:
        if metrics:
            metrics.close(record.complete)


def _look(output: Path, record: Record, checkpoints: CheckpointManager, process: Process) -> bool:
    """Look whether what the run has written is there, before it is said to be complete or to go on. For rank 0.

    Returns:
        Whether it is. Of a run that stops, which may go on without it, the rest is warned of.

    Raises:
        UserError: the run is complete, but something is not there.
    """
    assert record.metrics is not None, "this is rank 0"
    stored, warn = process.stored, process.console.warn
    looks: list[Callable[[], None]] = [
        record.describe_again,
        partial(integrity.check_there, output),
        record.metrics.check_there,
        checkpoints.check_last,
    ]
    if record.complete:
        looks.append(partial(integrity.check_results, output))
    if stored:
        looks.append(partial(stored.check_there, record.complete))
    there = True
    for look in looks:
        try:
            look()
        except UserError as error:
            if record.complete:
                raise
            warn(str(error))
            there = False
    return there


def _say_who_asked(stop: StopRequest, process: Process) -> None:
    """Say why the run stops, if rank 0 has not acknowledged a signal of its own. Collective."""
    causes = distributed.gather_texts(stop.cause, process.device)
    asked = next((rank for rank, cause in enumerate(causes) if cause), None)  # none: a callback wished it
    if stop.received is None and asked is not None:
        process.console.say(f"{causes[asked]}: {STOPPING}" + (f", as rank {asked} was asked" if asked else ""))


def _metrics_writer(
    output: Path,
    config: RunConfig,
    progress: TrainProgress,
    process: Process,
    kept: Fields,
) -> MetricsWriter:
    """The MetricsWriter of a run that begins where `progress` is; trackers get its configuration, data and software."""
    facts = runs.flatten(asdict(config)) | runs.read_fields(output / runs.DATA)
    facts |= {f"software.{name}": value for name, value in software().items()}
    facts |= {
        "hardware.device": device_name(process.device),
        "hardware.processes": process.environment.world_size,
    }
    return MetricsWriter(
        output,
        progress.state.step,
        progress.state.evaluated_step,
        config.evaluation.metric,
        config.monitor.trackers,
        config.monitor.project,
        facts,
        kept.get(TRACKERS, {}),
        kept.get(LINES),
    )
