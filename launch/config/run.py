"""The configuration that pretraining and fine-tuning share, and the checks between its sections."""

from __future__ import annotations

from dataclasses import Field
from typing import TYPE_CHECKING, ClassVar, Literal

from cloze.launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from cloze.launch.config.sections import CheckpointConfig, EvaluationConfig, MonitorConfig, ZeroConfig
from cloze.launch.config.training import TrainConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


class RunConfig:
    """The fields that training, checkpoints and the run's folder need of any run.

    Not a dataclass: each kind of run declares the fields in its own order, with its own defaults and descriptions.
    """

    if TYPE_CHECKING:  # each kind of run is a dataclass; jsonargparse would read the annotation as a field
        __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    output: str
    seed: int
    processes: int | Literal["auto"]
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    monitor: MonitorConfig
    zero: ZeroConfig
    loss_scale: LossScaleConfig
    deepspeed: Fields

    @property
    def sharding_stage(self) -> int:
        """ZeRO stage at which DeepSpeed cuts tensors into parts: 0 for optimizers that need them whole, whose work is
        divided by tensors (launch/engine/division.py)."""
        return 0 if self.optimizer.whole_tensors else self.zero.stage


def check_sections(config: RunConfig) -> None:
    """Raise UserError for values of different sections of a run that contradict each other."""
    _check_stage(config)
    warmup = config.schedule.warmup_steps
    if config.train.time_budget_hours is not None and warmup is not None:
        raise UserError(
            f"schedule.warmup_steps: found {warmup} with train.time_budget_hours, which does not count steps, expected "
            "null; use --schedule.warmup_steps null --schedule.warmup_share 0.06"
        )
    if config.train.time_budget_hours is not None and config.schedule.name == "exponential":
        raise UserError(
            "schedule.name: found exponential with train.time_budget_hours, expected a schedule that counts no steps"
        )


def _check_stage(config: RunConfig) -> None:
    """The optimizer, the precision and compiled layers have to fit what zero partitions."""
    optimizer, whole, stage = config.optimizer.name, config.optimizer.whole_tensors, config.zero.stage
    fp16 = config.train.precision == "fp16"
    if fp16 and whole:
        raise UserError(
            f"optimizer.name: found {optimizer} with train.precision fp16, expected adamw: it needs whole tensors, "
            "which DeepSpeed's fp16 cuts into parts; use --train.precision bf16, or fp32 on a GPU without bf16"
        )
    # DeepSpeed accumulates fp16 gradients in fp32 only where it partitions (engine.py, _do_optimizer_sanity_check);
    # with one process stage 1 partitions nothing away.
    if fp16 and config.sharding_stage == 0:
        raise UserError(
            "train.precision: found fp16 at zero.stage 0, expected stage 1 to 3, where gradients are accumulated in "
            "fp32; add --zero.stage 1"
        )
    if config.train.compile and stage == 3:
        raise UserError(
            "train.compile: found true at zero.stage 3, expected stage 0 to 2, where a layer's weights stay in place; "
            "compiled code would keep those that stage 3 takes away"
        )
    if whole and stage == 3:
        raise UserError(
            f"optimizer.name: found {optimizer} at zero.stage 3, expected stage 0 to 2: it works on whole tensors, of "
            "which each process would hold a part; use --zero.stage 2, which divides optimizer states and gradients: "
            "by `cloze plan` 1.5 billion parameters fit on eight GPUs of 24 GB, 5 billion on 80 GB; or adamw"
        )
    if whole and config.zero.offload_optimizer:
        raise UserError(
            f"zero.offload_optimizer: found true with optimizer.name {optimizer}, expected false: only adamw's step "
            "runs in host memory; use adamw, or more GPUs, which divide the optimizer's states"
        )


def check_warmup(config: RunConfig) -> None:
    """Raise UserError for more steps of warmup than there are steps."""
    warmup, steps = config.schedule.warmup_steps, config.train.max_steps
    if config.train.time_budget_hours is None and warmup is not None and config.schedule.warmup_in(steps) > steps:
        raise UserError(
            f"schedule.warmup_steps: found {warmup}, expected at most train.max_steps = "
            f"{steps}; for a shorter run add --schedule.warmup_steps null, which makes "
            f"the warmup {config.schedule.warmup_share:g} of its steps (schedule.warmup_share)"
        )
