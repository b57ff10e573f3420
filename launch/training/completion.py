"""Which checkpoint is the best one, and when a run is complete: its target, patience, steps or time budget."""

import math
from dataclasses import replace
from typing import TypeVar

from cloze.launch.checkpoint.state import TrainState
from cloze.launch.config import EvaluationConfig, RunConfig, TrainConfig
from cloze.launch.config.training import AUTO
from cloze.pipeline.errors import UserError

Kind = TypeVar("Kind", bound=RunConfig)


def with_metric(config: Kind, usual: str) -> Kind:
    """The configuration with the name of the deciding metric: `usual` where `evaluation.metric` is auto."""
    metric = usual if config.evaluation.metric == AUTO else config.evaluation.metric
    return replace(config, evaluation=replace(config.evaluation, metric=metric))


def evaluated(config: EvaluationConfig, state: TrainState, scalars: dict[str, float], weights_step: int) -> TrainState:
    """The state after an evaluation of the weights of step `weights_step` that gave these `validation/...` scalars.

    A best value of another metric, from before the configuration was changed, is ignored.

    Raises:
        UserError: evaluation.metric is not among them.
    """
    name = f"validation/{config.metric}"
    if name not in scalars:
        known = ", ".join(sorted(key.removeprefix("validation/") for key in scalars))
        raise UserError(f"evaluation.metric: found {config.metric!r}, expected one of what is measured here: {known}")
    value, best = scalars[name], state.best_value if state.best_metric == config.metric else None
    if math.isfinite(value) and (best is None or config.is_better(value, best)):
        return replace(
            state, best_metric=config.metric, best_step=weights_step, best_value=value, evaluations_since_best=0
        )
    return replace(state, evaluations_since_best=state.evaluations_since_best + 1)


def completion(config: RunConfig, state: TrainState) -> str | None:
    """Why a run is complete, or None if it must continue.

    Args:
        config: configuration of the run; its sections train and evaluation are read.
    """
    evaluation, best = config.evaluation, state.best_value
    if state.best_metric == evaluation.metric and best is not None:
        shown = f"{evaluation.metric} is {best:.4f} at step {state.best_step}"
        target = evaluation.target
        if target is not None and (best == target or evaluation.is_better(best, target)):
            return f"{shown}: the target of {target} is reached"
        if evaluation.patience is not None and state.evaluations_since_best >= evaluation.patience:
            return f"{shown}, and not better in {state.evaluations_since_best} evaluations since"
    return ending(config.train, state)


def ending(train: TrainConfig, state: TrainState) -> str | None:
    """Why a run has reached its length (steps or time budget), or None."""
    if train.budget_seconds is not None and state.seconds >= train.budget_seconds:
        return f"the time budget of {train.time_budget_hours:g} hours is used up"
    if state.step >= train.max_steps:
        return f"all {train.max_steps} steps are done"
    return None
