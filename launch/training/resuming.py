"""Which checkpoint a run goes on from, and what it takes from there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from cloze.launch.checkpoint.complete_check import check_begun_again, measures_of, other_measure, said_otherwise
from cloze.launch.checkpoint.deepspeed_files import known_content
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import TrainState, saved_alike
from cloze.launch.checkpoint.stored_checkpoints import StoredCheckpoints
from cloze.launch.config import RunConfig
from cloze.launch.engine.content import OtherContent, described, has_values
from cloze.launch.engine.engine import Engine
from cloze.launch.run import runs
from cloze.launch.run.resume_check import check_checkpoint
from cloze.launch.run.status_file import RefusedStartError, read_status
from cloze.launch.system import distributed
from cloze.launch.training.process import Process
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.launch.training.weight_average import WeightAverage
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


def open_checkpoints(
    config: RunConfig, facts: runs.Facts, process: Process
) -> tuple[CheckpointManager, int | None, bool]:
    """The run's checkpoints, the step to resume from (None: a new run), and whether it was saved at another world size.

    Args:
        facts: hashes of the inputs, which a resume compares (check_folder).

    Raises:
        UserError: checkpoint.resume requires or forbids a checkpoint, all are damaged, or the newest good one belongs
        to another run, or to this one at its end, and it would neither go on nor be measured again.
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
            stage=config.zero.stage,
        )
    else:
        checkpoints = CheckpointManager(
            folder, process.environment, process.device, keep_last=keep_last, warn=process.console.warn
        )
    step = _find_resume(config, checkpoints)
    if step is None:
        return checkpoints, None, False
    check_checkpoint(checkpoints.path(step), checkpoints.state(step), config, facts)
    check_begun_again(config, facts, checkpoints.state(step))
    elastic = checkpoints.is_elastic(step)
    if elastic:
        process.console.say(f"step {step} was saved by another number of processes: converting it")
        checkpoints.convert(step)
    return checkpoints, step, elastic


def _find_resume(config: RunConfig, checkpoints: CheckpointManager) -> int | None:
    """Step to resume from, agreed by all ranks, or None for a new run."""
    step = checkpoints.agree_on_latest()
    is_there = step is not None or bool(checkpoints.steps())
    some = distributed.from_main(is_there, checkpoints.device)  # as rank 0 sees the shared folder
    policy = config.checkpoint.resume
    if policy == "required" and step is None:
        raise UserError(
            f"checkpoint.resume: found no good checkpoint in {checkpoints.folder}, expected one since it "
            "is `required`; use `auto` to start from scratch"
        )
    if policy == "never" and some:
        raise RefusedStartError(
            f"checkpoint.resume: found checkpoints in {checkpoints.folder}, expected none since it is "
            "`never`; choose another --output or use `auto`"
        )
    if step is None and some:
        raise UserError(
            f"{checkpoints.folder}: found every checkpoint damaged, expected a good one; restore one, "
            "or choose another --output to start from scratch"
        )
    lost = read_status(checkpoints.folder.parent).get("step", 0)  # logged, perhaps before the first checkpoint was due
    if not some and lost and checkpoints.environment.is_main:
        checkpoints.warn(
            f"{checkpoints.folder}: found no checkpoint, though the run had reached step {lost}: it begins anew, and "
            "so does its curve; if its checkpoints lie on a disk that isn't mounted, end this start and mount it"
        )
    if step is not None and step > config.train.max_steps:
        raise RefusedStartError(
            f"train.max_steps: found {config.train.max_steps}, expected at least {step}, the step of the "
            f"newest checkpoint in {checkpoints.folder}"
        )
    return step


def resume(
    step: int,
    checkpoints: CheckpointManager,
    engine: Engine,
    progress: TrainProgress,
    average: WeightAverage | None,
    process: Process,
    config: RunConfig,
    facts: runs.Facts,
) -> None:
    """Go on from a published checkpoint of the run: weights, optimizer states, progress and average. Collective."""
    state, rank_states = checkpoints.load(engine, step)
    before = checkpoints.state(step).get("measures", {})  # an earlier version has written none
    state = _with_comparable_best(state, before, measures_of(config, facts), process.console.warn)
    with known_content(checkpoints.path(step)):
        progress.resume(state, [_window_in(saved) for saved in rank_states])
        if said_otherwise(checkpoints.state(step), config, facts):
            progress.saved = None  # if it ends here, it is saved again with what it has ended by
        if average:
            alike = saved_alike(checkpoints.state(step), process.environment.world_size, engine.stage)
            if not average.load(checkpoints.path(step), alike):
                process.console.warn(f"step {step} holds no average of the weights: one begins with them here")


def _with_comparable_best(state: TrainState, before: Fields, now: Fields, warn: Callable[[str], None]) -> TrainState:
    """The state without its best evaluation where that was measured on something else than those to come.

    Args:
        before: how it was measured, as the checkpoint says; empty: an earlier version has written it.
        now: how it is measured from now on.
    """
    name = other_measure(before, now) if before else None
    if name is None or state.best_metric is None:
        return state
    warn(
        f"{name}: found {now.get(name)}, {before.get(name)} until now: the best {state.best_metric} of step "
        f"{state.best_step} does not compare with what comes and no longer counts"
    )
    return replace(state, best_metric=None, best_value=None, best_step=-1, evaluations_since_best=0)


def _window_in(saved: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sums since the last line of metrics in what a rank has saved, or OtherContent."""
    window = saved.get("window")
    if not isinstance(window, torch.Tensor) or window.dtype != torch.float64 or not has_values(window):
        raise OtherContent(f"window is {described(window)}, expected a tensor of float64")
    return window
