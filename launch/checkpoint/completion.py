"""Which checkpoint is the best one, and when a run is complete: its target, patience, steps or time budget."""

import math
from dataclasses import replace
from typing import TypeVar

from cloze.launch.checkpoint.state import TrainState
from cloze.launch.config import EvaluationConfig, RunConfig, TrainConfig
from cloze.launch.config.metrics import lower_is_better
from cloze.launch.config.training import AUTO
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# The fields that say when a run is complete, and the one by which its best evaluation is chosen.
ENDS = "train.max_steps", "train.time_budget_hours", "evaluation.target", "evaluation.patience"
METRIC = "evaluation.metric"

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
    return reached(ends_of(config), state)


def ends_of(config: RunConfig) -> Fields:
    """The fields that say when a run is complete, by dotted names."""
    train, evaluation = config.train, config.evaluation
    values = train.max_steps, train.time_budget_hours, evaluation.target, evaluation.patience, evaluation.metric
    return dict(zip((*ENDS, METRIC), values, strict=True))


def reached(ends: Fields, state: TrainState) -> str | None:
    """`completion` by the result of `ends_of`, which may be an earlier configuration's."""
    max_steps, hours, target, patience = (ends[name] for name in ENDS)
    metric, best = ends[METRIC], state.best_value
    if state.best_metric == metric and best is not None:
        shown = f"{metric} is {best:.4f} at step {state.best_step}"
        if target is not None and (best <= target if lower_is_better(metric) else best >= target):
            return f"{shown}: the target of {target} is reached"
        if patience is not None and state.evaluations_since_best >= patience:
            return f"{shown}, and not better in {state.evaluations_since_best} evaluations since"
    return _length_reached(max_steps, hours, state)


def ending(train: TrainConfig, state: TrainState) -> str | None:
    """Why a run has reached its length (steps or time budget), or None."""
    return _length_reached(train.max_steps, train.time_budget_hours, state)


def _length_reached(max_steps: int, hours: float | None, state: TrainState) -> str | None:
    if hours is not None and state.seconds >= hours * 3600:
        return f"the time budget of {hours:g} hours is used up"
    if state.step >= max_steps:
        return f"all {max_steps} steps are done"
    return None
