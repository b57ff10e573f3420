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
    linear 1 - t; cosine (1 + cos pi t) / 2; polynomial (1 - t)^power; all three scaled to end at final_share;
    constant 1; inverse_sqrt sqrt(warmup / step) (Vaswani et al. 2017).
    """
    warmup = warmup_steps(config, max_steps)
    if step < warmup:
        return step / warmup
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / max(1, step))
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    left = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "polynomial": (1 - done) ** config.power,
    }[config.name]
    return config.final_share + (1 - config.final_share) * left
