"""Configuration: frozen dataclasses with a sentence under each field, checked when they are made."""

from cloze.launch.config.commands import (
    CompletionConfig,
    DoctorConfig,
    ExportConfig,
    QuickstartConfig,
    RunsConfig,
    StatusConfig,
)
from cloze.launch.config.data import DataPhase, DataSource, MixtureConfig
from cloze.launch.config.finetuning import EmbeddingConfig, FinetuneConfig
from cloze.launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from cloze.launch.config.pretraining import DeepSpeedConfig, PretrainConfig, PretrainEvaluationConfig, SweepConfig
from cloze.launch.config.run import RunConfig
from cloze.launch.config.sections import (
    CheckpointConfig,
    EmaConfig,
    EvaluationConfig,
    MaskingPhase,
    MonitorConfig,
    PretrainMaskingConfig,
    ZeroConfig,
)
from cloze.launch.config.training import BatchArithmetic, TrainConfig

__all__ = [
    "BatchArithmetic",
    "CheckpointConfig",
    "CompletionConfig",
    "DataPhase",
    "DataSource",
    "DeepSpeedConfig",
    "DoctorConfig",
    "EmaConfig",
    "EmbeddingConfig",
    "EvaluationConfig",
    "ExportConfig",
    "FinetuneConfig",
    "LossScaleConfig",
    "MaskingPhase",
    "MixtureConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "PretrainEvaluationConfig",
    "PretrainMaskingConfig",
    "QuickstartConfig",
    "RunConfig",
    "RunsConfig",
    "ScheduleConfig",
    "StatusConfig",
    "SweepConfig",
    "TrainConfig",
    "ZeroConfig",
]
