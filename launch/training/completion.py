"""When a run is complete: its target, patience, steps or time budget."""

from cloze.launch.checkpoint import TrainState
from cloze.launch.config import RunConfig, TrainConfig


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
