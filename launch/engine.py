"""DeepSpeed: the configuration made from ours, and the engine."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError
from torch import nn

from launch import distributed
from launch.config import BatchArithmetic, PretrainConfig
from launch.optimizers import build_optimizer
from pipeline.errors import UserError

# DeepSpeed reports its own progress every step by default; ours is in metrics.py.
NEVER = 2**31

# Above any gradient norm; a number and not infinity, which JSON does not have.
NO_CLIPPING = 1e30

# Whole sections of DeepSpeed's that would quietly win over fields of ours.
OURS_BY = {
    "bf16": "train.precision", "bfloat16": "train.precision", "fp16": "train.precision",
    "data_types": "train.precision", "torch_autocast": "train.precision", "optimizer": "the section optimizer",
    "scheduler": "the section schedule", "checkpoint": "the section checkpoint", "tensorboard": "launch/metrics.py",
}

# Settings with which alone a run is right, and why.
COUNTED_ON = {
    "gradient_allreduce_op": ("mean", "the loss counts on gradients that are averaged over the processes"),
    "gradient_predivide_factor": (1.0, "gradients are summed in fp32, which needs no factor, and at stage 3 "
                                       "DeepSpeed does not take back every one"),
    "managed_gradient_accumulation": (True, "the run tells DeepSpeed which micro-batch is a step's last"),
    "zero_optimization.compute_grad_norm": (True, "by its norm an infinite or NaN gradient is known, and skipped"),
}

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def deepspeed_config(config: PretrainConfig, world_size: int, *, load_universal: bool = False) -> dict:
    """The JSON-like dict that DeepSpeed is given; pure.

    Args:
        load_universal: whether the engine will load a checkpoint that was converted for another number of processes.

    bf16 without partitioning runs as torch autocast over fp32 parameters, because DeepSpeed has no bf16 parameters
    with fp32 accumulation at stage 0. Elsewhere parameters are 16-bit with fp32 master copies in the optimizer, and
    gradients are accumulated and reduced in fp32: both of DeepSpeed's defaults would be the model's dtype.
    """
    batch = BatchArithmetic.of(config.train, world_size)
    precision, stage = config.train.precision, config.zero.stage
    result: dict = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        # Without partitioning the norm is measured while clipping, so none is a limit that nothing reaches.
        "gradient_clipping": config.train.gradient_clipping or (0.0 if stage else NO_CLIPPING),
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
        # What it names as safe in lower precision is which gradients it would send in it: none.
        result["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    elif precision == "bf16":
        result["bf16"] = {"enabled": True}
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    elif precision == "fp16":
        scale = config.loss_scale
        result["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": scale.initial_power,
                          "loss_scale_window": scale.window, "hysteresis": scale.hysteresis,
                          "min_loss_scale": scale.minimum}
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    if load_universal:
        result["checkpoint"] = {"load_universal": True}
    for name in OURS_BY.keys() & config.deepspeed.keys():
        raise UserError(f"deepspeed.{name}: found a setting, expected none: {OURS_BY[name]} decides it")
    merged = _merge(result, config.deepspeed, "deepspeed")
    for name in merged["zero_optimization"]:
        if "offload" in name and name not in result["zero_optimization"]:
            raise UserError(f"deepspeed.zero_optimization.{name}: found a setting, expected none: "
                            "zero.offload_optimizer and zero.offload_parameters decide it")
    for path, (expected, reason) in COUNTED_ON.items():
        section, _, name = path.rpartition(".")
        found = (merged[section] if section else merged).get(name, expected)
        if found != expected:
            raise UserError(f"deepspeed.{path}: found {found!r}, expected {expected!r}: {reason}")
    return merged


def _merge(made: dict, added: dict, path: str) -> dict:
    """Both, nested; UserError for a value that `made` holds already and differently."""
    merged = dict(made)
    for name, value in added.items():
        if isinstance(value, dict) and isinstance(made.get(name), dict):
            merged[name] = _merge(made[name], value, f"{path}.{name}")
        elif name in made and made[name] != value:
            raise UserError(f"{path}.{name}: found {value!r}, expected {made[name]!r}, which the configuration of the "
                            "run makes; change the field that it follows from")
        else:
            merged[name] = value
    return merged


def build_engine(
    model: nn.Module, config: PretrainConfig, made: dict, device: torch.device
) -> deepspeed.DeepSpeedEngine:
    """Wrap the model; its parameters move to `device` and, for bf16 and fp16, become 16-bit.

    Args:
        made: what `deepspeed_config` made of the configuration.

    Raises:
        UserError: fp16 on a device that has none, or DeepSpeed refuses what the section deepspeed adds.
    """
    _check_fp16(made, device)
    # Its warnings about its own internals are not the user's to mend; its errors raise.
    deepspeed_logger.setLevel(logging.ERROR)
    # On CPU it would compile a C++ kernel at every start, which only its inference code uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_without_compiler()
    model.to(device)
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    deepspeed.comm.comm.cdb.new_group = distributed.new_group  # gradients are reduced in a group that it makes
    optimizer = build_optimizer(model, config.optimizer, config.train.learning_rate,
                                states_on_cpu="offload_optimizer" in made["zero_optimization"])
    try:
        # Without device_rank it takes the GPU numbered LOCAL_RANK, also where each process sees one GPU alone.
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=made,
                                          args=SimpleNamespace(device_rank=device.index or 0))
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError, DeepSpeedConfigError) as error:
        if not config.deepspeed:
            raise  # nothing of the user's is in it
        raise _refusal(error) from error
    if engine.fp16_enabled():
        # At the smallest scale it would raise; how many skips in a row are too many is train.max_skipped_steps.
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        _grow_scale_after_step(engine.optimizer)
    if not engine.zero_optimization():
        _skip_infinite_steps(engine, device)
        if engine.dp_world_size == 1:
            # The sum over one process is there already; all gradients would be copied to a buffer and back for it.
            engine.allreduce_and_copy = lambda *arguments, **options: None
    return engine


def _refusal(error: Exception) -> UserError:
    """What DeepSpeed has said against its configuration, in one line."""
    if isinstance(error, ValidationError):  # of pydantic, with which it reads most of it
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        return UserError(f"deepspeed: found {where} = {found['input']!r}, expected a setting that DeepSpeed knows "
                         f"({found['msg']}); see its configuration reference")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UserError(f"deepspeed: found what DeepSpeed refuses ({reason}), expected settings that it takes in such a "
                     "run; see its configuration reference")


def _check_fp16(made: dict, device: torch.device) -> None:
    if made.get("fp16", {}).get("enabled") and device.type != "cuda":
        raise UserError(f"train.precision: found fp16, expected bf16 or fp32 on {device.type}: only GPUs train in fp16")


def _import_muon_without_compiler() -> None:
    """Import DeepSpeed's Muon, as every ZeRO stage does, without the compiler that its decorators ask for.

    torch.compile imports Inductor at once: a quarter of the time that a start takes. We never run these functions: our
    Muon is in launch/optimizers/.
    """
    compiles = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        with contextlib.suppress(ModuleNotFoundError):  # another version of DeepSpeed, which then has nothing to import
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compiles


def _grow_scale_after_step(optimizer) -> None:
    """Let the gradient of an fp16 step be divided by the scale that its loss was multiplied by.

    DeepSpeed's partitioned optimizers update the scale before they unscale: the gradient of each step at which it grows
    would be halved. Only after an overflow, whose step unscales nothing, is it updated at once.
    """
    update, step = optimizer._update_scale, optimizer.step

    def update_after_overflow(has_overflow: bool) -> None:
        if has_overflow:
            update(True)

    def step_then_grow(*arguments, **options) -> None:
        step(*arguments, **options)
        if not optimizer.overflow:
            update(False)

    optimizer._update_scale, optimizer.step = update_after_overflow, step_then_grow


def _skip_infinite_steps(engine: deepspeed.DeepSpeedEngine, device: torch.device) -> None:
    """Give stage 0 what DeepSpeed's partitioned optimizers do: keep the gradient norm, skip a step if it is not finite.

    On a GPU torch's fused optimizers and ours skip by `found_inf`, and no host waits. On a CPU there is nothing to wait
    for: the host asks, as for DeepSpeed's kernels, which know nothing of it.
    """
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    engine.found_inf = torch.zeros((), device=device)
    step = optimizer.step

    def clip() -> None:
        engine._global_grad_norm = nn.utils.clip_grad_norm_(parameters, engine.gradient_clipping())
        engine.found_inf.copy_(~engine._global_grad_norm.isfinite())

    def step_if_finite(*arguments, **options):
        if not engine.found_inf.item():
            return step(*arguments, **options)

    engine.clip_fp32_gradients = clip
    if device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = engine.found_inf
    else:
        optimizer.step = step_if_finite


def step_skipped(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """Whether the last step was skipped for an infinite or NaN gradient, alike on all ranks: float64 (1,), 0 or 1."""
    if engine.zero_optimization():
        # full, and not tensor, which would be made on the host and wait for the device to take it
        return torch.full((1,), float(engine.optimizer.overflow), dtype=torch.float64, device=engine.device)
    return engine.found_inf.double().reshape(1)


def base_optimizer(engine: deepspeed.DeepSpeedEngine) -> torch.optim.Optimizer:
    """The optimizer inside DeepSpeed's partitioning one, or the only one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def master_fragments(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Name of each parameter with the flat part of its fp32 master that this process updates; views, nothing is copied.

    Where DeepSpeed keeps them: the parameter itself at stage 0, `_hp_mapping` at stages 1 and 2, `grad_position` at 3;
    at these three there is none of a parameter that does not learn.
    """
    for name, parameter in engine.module.named_parameters():
        if not engine.zero_optimization():
            yield name, parameter.detach()
        elif engine.zero_optimization_stage() < 3:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:  # else other processes have all of it
                yield name, mapping.hp_fragment.detach()
        elif (place := engine.optimizer.grad_position.get(engine.optimizer.get_param_id(parameter))) is not None:
            group, start, length = place
            yield name, engine.optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, start, length)


def full_parameter(engine: deepspeed.DeepSpeedEngine, parameter: nn.Parameter) -> torch.Tensor:
    """A copy of a parameter in fp32 on the host, gathered from all processes where it is partitioned. Collective."""
    with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
        return parameter.detach().float().cpu().clone()


def set_learning_rate(engine: deepspeed.DeepSpeedEngine, rate: float) -> None:
    """Set the rate that the next optimizer step uses, in every group its share."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def compute_dtype(engine: deepspeed.DeepSpeedEngine) -> torch.dtype:
    """What matrix products run in: read off the live engine, not off the configuration."""
    if engine.torch_autocast_enabled():
        return engine.torch_autocast_dtype()
    return next(engine.module.parameters()).dtype


def live_precision(engine: deepspeed.DeepSpeedEngine) -> str:
    """Formats of matrix products, of parameters and of their copies that the optimizer updates, read off the live
    engine."""
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    stored, updated = ("+".join(sorted({names[tensor.dtype] for tensor in tensors})) for tensors in (
        engine.module.parameters(), (fragment for _, fragment in master_fragments(engine))))
    text = f"{names[compute_dtype(engine)]} products, {stored} parameters"
    return text if stored == updated else f"{text} with {updated} master copies"
