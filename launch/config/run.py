"""What every run of training is told, pretraining and fine-tuning alike."""

from __future__ import annotations

from typing import Any

from cloze.launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from cloze.launch.config.running import CheckpointConfig, EvaluationConfig, MonitorConfig, ZeroConfig
from cloze.launch.config.training import TrainConfig


class RunConfig:
    """What training, checkpoints and the run's folder read of a run, whatever it trains.

    No dataclass: each kind of run declares the fields in its own order, with its own defaults and sentences.
    """

    output: str
    seed: int
    processes: int | str
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    monitor: MonitorConfig
    zero: ZeroConfig
    loss_scale: LossScaleConfig
    deepspeed: dict[str, Any]
