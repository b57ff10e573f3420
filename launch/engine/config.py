"""DeepSpeed's configuration, made from ours."""

from typing import Any

import torch

from cloze.launch.config import BatchArithmetic, RunConfig
from cloze.pipeline.errors import UserError

# DeepSpeed reports its own progress every step by default; ours is in launch/training/curves.py.
NEVER = 2**31

# Whole sections of DeepSpeed's that would quietly win over fields of ours.
OURS_BY = {
    "bf16": "train.precision",
    "bfloat16": "train.precision",
    "fp16": "train.precision",
    "data_types": "train.precision",
    "torch_autocast": "train.precision",
    "optimizer": "the section optimizer",
    "scheduler": "the section schedule",
    "checkpoint": "the section checkpoint",
    "tensorboard": "launch/run/metrics.py",
}

# Settings that a run needs in order to be right, and why.
COUNTED_ON = {
    "gradient_allreduce_op": ("mean", "the loss counts on gradients that are averaged over the processes"),
    "gradient_predivide_factor": (
        1.0,
        "gradients are summed in fp32, which needs no factor, and at stage 3 DeepSpeed does not take back every one",
    ),
    "prescale_gradients": (False, "gradients are summed in fp32, and divided after it"),
    "managed_gradient_accumulation": (True, "the run tells DeepSpeed which micro-batch is a step's last"),
    "zero_optimization.compute_grad_norm": (True, "by its norm an infinite or NaN gradient is known, and skipped"),
}

Settings = dict[str, Any]
"""DeepSpeed's configuration: nested sections of JSON's values."""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def deepspeed_config(config: RunConfig, world_size: int, *, load_universal: bool = False) -> Settings:
    """The JSON-like dict that DeepSpeed is given; pure.

    Args:
        load_universal: whether the engine will load a checkpoint that was converted for another number of processes.

    bf16 without partitioning, also where whole tensors are divided (division.py), runs as torch autocast over fp32
    parameters, because DeepSpeed has no bf16 parameters with fp32 accumulation at stage 0. Elsewhere parameters are
    16-bit with fp32 master copies in the optimizer, and gradients are accumulated and reduced in fp32: both of
    DeepSpeed's defaults would be the model's dtype.
    """
    batch = BatchArithmetic.of(config.train, world_size)
    precision, stage = config.train.precision, config.sharding_stage
    result: Settings = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        # At stage 0 the engine clips (engine.py).
        "gradient_clipping": (config.train.gradient_clipping or 0.0) if stage else 0.0,
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage},
        # The optimizer is ours (torch's AdamW); DeepSpeed knows a list of class names only.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
        # Twice a micro-batch it would wait for the device (utils/timer.py); our figures are in throughput.py.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.zero.offload_optimizer:
        result["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        result["zero_force_ds_cpu_optimizer"] = config.optimizer.implementation == "deepspeed"
    if config.zero.offload_parameters:
        result["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if precision == "autocast" or (precision == "bf16" and stage == 0):
        # DeepSpeed would send the gradients of the modules in this list in lower precision.
        result["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    elif precision == "bf16":
        result["bf16"] = {"enabled": True}
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    elif precision == "fp16":
        scale = config.loss_scale
        result["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": scale.initial_power,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
        }
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    if load_universal:
        result["checkpoint"] = {"load_universal": True}
    for name in OURS_BY.keys() & config.deepspeed.keys():
        raise UserError(f"deepspeed.{name}: found a setting, expected none: {OURS_BY[name]} decides it")
    merged = _merge(result, config.deepspeed, "deepspeed")
    for name in merged["zero_optimization"]:
        if "offload" in name and name not in result["zero_optimization"]:
            raise UserError(
                f"deepspeed.zero_optimization.{name}: found a setting, expected none: "
                "zero.offload_optimizer and zero.offload_parameters decide it"
            )
    for path, (expected, reason) in COUNTED_ON.items():
        section, _, name = path.rpartition(".")
        found = (merged[section] if section else merged).get(name, expected)
        if found != expected:
            raise UserError(f"deepspeed.{path}: found {found!r}, expected {expected!r}: {reason}")
    return merged


def _merge(ours: Settings, added: Settings, path: str) -> Settings:
    """Both, nested; UserError for a value that `ours` holds already and differently."""
    merged = dict(ours)
    for name, value in added.items():
        if isinstance(value, dict) and isinstance(ours.get(name), dict):
            merged[name] = _merge(ours[name], value, f"{path}.{name}")
        elif name in ours and ours[name] != value:
            raise UserError(
                f"{path}.{name}: found {value!r}, expected {ours[name]!r}, which the configuration of the "
                "run makes; change the field that it follows from"
            )
        else:
            merged[name] = value
    return merged
