"""What a run is told: frozen dataclasses, a sentence under each field, checks when they are made."""

from launch.config.commands import DoctorConfig, ExportConfig, QuickstartConfig
from launch.config.finetuning import FinetuneConfig
from launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from launch.config.pretraining import DeepSpeedConfig, PretrainConfig
from launch.config.running import CheckpointConfig, EvaluationConfig, MonitorConfig, ZeroConfig
from launch.config.training import BatchArithmetic, MaskingConfig, TrainConfig

__all__ = [
    "BatchArithmetic", "CheckpointConfig", "DeepSpeedConfig", "DoctorConfig", "EvaluationConfig", "ExportConfig",
    "FinetuneConfig", "LossScaleConfig", "MaskingConfig", "MonitorConfig", "OptimizerConfig", "PretrainConfig",
    "QuickstartConfig", "ScheduleConfig", "TrainConfig", "ZeroConfig",
]
