"""Which checkpoint a run goes on from, and what it takes from there."""

from dataclasses import replace
from pathlib import Path

import torch

from cloze.launch.checkpoint.deepspeed_files import known_content
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import TrainState, saved_alike
from cloze.launch.checkpoint.stored_checkpoints import StoredCheckpoints
from cloze.launch.config import RunConfig
from cloze.launch.engine.content import OtherContent, described, has_values
from cloze.launch.engine.engine import Engine
from cloze.launch.run import runs
from cloze.launch.run.resume_check import ENDS, check_checkpoint, ends_of, measures_of, other_measure, without_sets
from cloze.launch.run.status_file import read_status
from cloze.launch.system import distributed
from cloze.launch.training.completion import completion, ending
from cloze.launch.training.process import Process
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.launch.training.weight_average import WeightAverage
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import is_number


def open_checkpoints(
    config: RunConfig, facts: runs.Facts, process: Process
) -> tuple[CheckpointManager, int | None, bool]:
    """The run's checkpoints, the step to resume from (None: a new run), and whether it was saved at another world size.

    Args:
        facts: hashes of the inputs, which a resume compares (check_folder).

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
        raise UserError(
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
        raise UserError(
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
    """Go on from a published checkpoint of the run: weights, optimizer states, progress and average. Collective.

    Raises:
        UserError: the run is at its end, and was measured on something else, or ended by other fields.
    """
    state, rank_states = checkpoints.load(engine, step)
    saved = checkpoints.state(step)  # an earlier version has written neither
    _check_end(config, state, saved["ends"] if isinstance(saved.get("ends"), dict) else None)
    state = _with_comparable_best(config, state, saved.get("measures"), measures_of(config, facts), process)
    with known_content(checkpoints.path(step)):
        progress.resume(state, [_window_in(saved) for saved in rank_states])
        if average:
            alike = saved_alike(checkpoints.state(step), process.environment.world_size, engine.stage)
            if not average.load(checkpoints.path(step), alike):
                process.console.warn(f"step {step} holds no average of the weights: one begins with them here")


def _check_end(config: RunConfig, state: TrainState, before: Fields | None) -> None:
    """Raise UserError for a run that is complete by other fields than it was: it would neither go on nor be measured
    again, but its configuration be replaced.

    Args:
        before: by which fields, as the checkpoint says.
    """
    if before is None or state.evaluated_step != state.step or not (end := completion(config, state)):
        return
    if not all(before.get(name) is None or is_number(before[name]) for name in ENDS) or not before.get(ENDS[0]):
        raise UserError(f"ends: found {before!s:.200} in the checkpoint's state.json, expected numbers; remove it")
    known: dict[str, Fields] = {"train": {}, "evaluation": {}}
    for name in ENDS:
        section, _, field = name.partition(".")
        known[section][field] = before.get(name)
    train, evaluation = replace(config.train, **known["train"]), replace(config.evaluation, **known["evaluation"])
    was = replace(config, train=train, evaluation=evaluation)
    other = next((name for name, value in ends_of(config).items() if before.get(name) != value), None)
    if other and completion(was, state):
        raise UserError(
            f"{other}: found {ends_of(config)[other]}, expected {before.get(other)}, by which this run has ended: it "
            f"is complete ({end}) and would not go on; give it as it was"
        )


def _with_comparable_best(
    config: RunConfig, state: TrainState, before: Fields | None, now: Fields, process: Process
) -> TrainState:
    """The state without its best evaluation where that was measured on something else than those to come.

    Args:
        before: on what, as the checkpoint says; None: an earlier version has written it.
        now: on what from now on.

    Raises:
        UserError: there is nothing to come.
    """
    if before is None:
        return state
    if state.evaluated_step == state.step and (end := ending(config.train, state)):
        if name := other_measure(without_sets(before), without_sets(now)):
            raise UserError(
                f"{name}: found {now.get(name)}, expected {before.get(name)}, by which this run was measured: {end}, "
                "and nothing is measured again; give it as it was, or measure its checkpoints with cloze evaluate"
            )
        return state
    name = other_measure(before, now)
    if name is None or state.best_metric is None:
        return state
    process.console.warn(
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
