"""Learning-rate multipliers: pure functions of the step, so that a resume cannot get them wrong."""

from __future__ import annotations

import math

from launch.config import ScheduleConfig


def warmup_steps(config: ScheduleConfig, max_steps: int) -> int:
    """Steps of warmup of a run of `max_steps`."""
    return round(config.warmup_share * max_steps) if config.warmup_steps is None else config.warmup_steps


def multiplier(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """Share of the peak rate, 0 to 1, that the optimizer step number `step` (from 0) uses.

    The warmup rises from 0 over `warmup` steps: step s uses s / warmup, so that step 0 moves nothing, as in the BERT
    release (`optimization.py`). After it, with t = share of the remaining steps that is done:

    | name         | multiplier                                                                           |
    |--------------|--------------------------------------------------------------------------------------|
    | linear       | 1 - t                                                                                |
    | cosine       | (1 + cos pi t) / 2                                                                   |
    | polynomial   | (1 - t)^power                                                                        |
    | poly_nvidia  | (1 - step / max_steps)^power: blind to the warmup, so that the rate drops at its end |
    |              | (DeepLearningExamples, BERT `schedulers.py`)                                         |
    | constant     | 1                                                                                    |
    | inverse_sqrt | sqrt(warmup / step) (Vaswani et al. 2017)                                            |
    | wsd          | 1, and over the last decay_share of all steps linearly down                          |
    | exponential  | factor^floor((step - warmup) / factor_steps)                                         |

    linear, cosine, polynomial and wsd are scaled to end at final_share.
    """
    warmup = warmup_steps(config, max_steps)
    if step < warmup:
        return step / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    left = min(1.0, (max_steps - min(step, max_steps)) / max(1, round(config.decay_share * max_steps)))
    shape = {
        "linear": lambda: 1 - done,
        "cosine": lambda: (1 + math.cos(math.pi * done)) / 2,
        "polynomial": lambda: (1 - done) ** config.power,
        "poly_nvidia": lambda: (1 - min(1.0, step / max_steps)) ** config.power,
        "constant": lambda: 1.0,
        "inverse_sqrt": lambda: math.sqrt(max(1, warmup) / max(1, step)),
        "wsd": lambda: left,
        "exponential": lambda: config.factor ** ((step - warmup) // config.factor_steps),
    }[config.name]()
    if config.name in ("linear", "cosine", "polynomial", "wsd"):
        return config.final_share + (1 - config.final_share) * shape
    return shape
