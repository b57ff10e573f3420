"""Which checkpoint is the best one: the metric that decides, and its best value."""

import math
from dataclasses import replace
from typing import TypeVar

from cloze.launch.checkpoint import TrainState
from cloze.launch.config import EvaluationConfig, RunConfig
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
