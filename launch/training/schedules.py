"""Learning rate schedules: multipliers as pure functions of the step or the time, so that a resume needs no state."""

import math
from collections.abc import Callable
from typing import NamedTuple

from cloze.launch.config import ScheduleConfig, TrainConfig


class SchedulePoint(NamedTuple):
    """Where a run is after its warmup."""

    at: float
    """The step, or the seconds used; at most `end`."""
    end: float
    warmup: float
    done: float
    """Share of what follows the warmup that is done, 0 to 1."""
    left: float
    """Share of the last part, `decay_share` of the run, that is left, 0 to 1."""


class Shape(NamedTuple):
    """A schedule after its warmup, 1 at its highest."""

    share: Callable[[ScheduleConfig, SchedulePoint], float]
    falls_to_zero: bool = True
    """Whether it is 0 at the end of the run, and so is scaled to end at final_share; others ignore that."""


SHAPES = {
    "linear": Shape(lambda config, run: 1 - run.done),
    "cosine": Shape(lambda config, run: (1 + math.cos(math.pi * run.done)) / 2),
    "polynomial": Shape(lambda config, run: (1 - run.done) ** config.power),
    "poly_nvidia": Shape(lambda config, run: (1 - run.at / run.end) ** config.power),
    "constant": Shape(lambda config, run: 1.0, falls_to_zero=False),
    "inverse_sqrt": Shape(lambda config, run: math.sqrt(max(1, run.warmup) / max(1, run.at)), falls_to_zero=False),
    "wsd": Shape(lambda config, run: run.left if config.decay_shape == "linear" else 1 - math.sqrt(1 - run.left)),
    "exponential": Shape(
        lambda config, run: config.factor ** ((run.at - run.warmup) // config.factor_steps), falls_to_zero=False
    ),
}


def multiplier(config: ScheduleConfig, at: float, end: float, tokens: int = 0) -> float:
    """Multiplier of the peak learning rate, 0 to 1, for an optimizer step.

    Args:
        at: number of the step from 0; with a time budget the seconds used before it.
        end: length of the run in steps; with a time budget in seconds.
        tokens: real tokens trained on before the step, for `warmup_tokens`.

    The warmup rises from `initial_share` over `warmup` steps: from 0, step s uses s / warmup, so that step 0 changes
    nothing, as in the BERT release (`optimization.py`). After it, with t = share of the steps after the warmup that are
    done:

    | name         | multiplier                                                                           |
    |--------------|--------------------------------------------------------------------------------------|
    | linear       | 1 - t                                                                                |
    | cosine       | (1 + cos pi t) / 2                                                                   |
    | polynomial   | (1 - t)^power                                                                        |
    | poly_nvidia  | (1 - at / end)^power: ignores the warmup, so that the rate drops at its end          |
    |              | (DeepLearningExamples, BERT `schedulers.py`; with power 1 the BERT release's own)    |
    | constant     | 1                                                                                    |
    | inverse_sqrt | sqrt(warmup / at) (Vaswani et al. 2017)                                              |
    | wsd          | 1, then decay over the last decay_share of all steps, linear or 1 - sqrt             |
    | exponential  | factor^floor((at - warmup) / factor_steps)                                           |

    Those that fall to 0 are scaled to end at final_share.
    """
    warmup = config.warmup_in(end)
    if config.warmup_tokens is not None and tokens < config.warmup_tokens:
        return _rise(config, tokens / config.warmup_tokens)
    if at < warmup:
        return _rise(config, at / warmup)
    at = min(at, end)
    done = min(1.0, (at - warmup) / max(1, end - warmup))
    left = min(1.0, (end - at) / max(1, round(config.decay_share * end)))
    shape = SHAPES[config.name]
    share = shape.share(config, SchedulePoint(at, end, warmup, done, left))
    return config.final_share + (1 - config.final_share) * share if shape.falls_to_zero else share


def _rise(config: ScheduleConfig, share: float) -> float:
    return config.initial_share + (1 - config.initial_share) * share


def describe(config: ScheduleConfig, train: TrainConfig) -> str:
    """Shape, length and warmup in words."""
    shrunk = ""
    if config.warmup_tokens is not None:
        warmup = f"{config.warmup_tokens:,} tokens"
    elif train.budget_seconds is not None:
        warmup = f"{config.warmup_share:.1%} of the time"
    else:
        steps = config.warmup_in(train.max_steps)
        warmup = f"{steps} steps"
        if config.warmup_steps not in (None, steps):
            shrunk = f", shrunk from {config.warmup_steps} with the run, from {config.warmup_of_steps:,} steps"
    length = "" if train.time_budget_hours is None else f" over {train.time_budget_hours:g} hours"
    return f"{config.name}{length}, {warmup} of warmup{shrunk}"
