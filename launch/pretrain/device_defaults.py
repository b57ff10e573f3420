"""Defaults that depend on the device: chosen at the first start, then saved. (The micro-batch: micro_batch_size.py.)

A run that resumes on another device keeps these choices, or prints one line about the differences.
"""

from dataclasses import replace
from pathlib import Path

import torch

from cloze.launch.config import PretrainConfig
from cloze.launch.config.training import divisors
from cloze.launch.engine.config import PRECISIONS
from cloze.launch.run import runs
from cloze.launch.system import distributed
from cloze.launch.system.compiling import lack
from cloze.launch.system.console import Console
from cloze.launch.system.data_sheets import DataSheet
from cloze.launch.system.devices import device_name, has_flash_attention_3
from cloze.model.attention import select_kernel

# Codes of the saved choice for from_main.
_NOTHING_KEPT, _NO, _YES = range(3)


def attention_kernel(config: PretrainConfig, device: torch.device) -> str:
    """The attention kernel that training uses on the device."""
    dtype = PRECISIONS.get(config.train.precision, torch.bfloat16)
    tokens = torch.empty(0, config.model.hidden_size, dtype=dtype, device=device)
    return select_kernel(config.train.attention_kernel, config.model, tokens, False)


def resolve_compile(config: PretrainConfig, device: torch.device, console: Console) -> PretrainConfig:
    """The configuration with true or false for `train.compile` if it was null. Collective.

    The choice of an earlier start is kept, unless this machine cannot compile.
    """
    if config.train.compile is not None:
        return config
    kept = runs.device_facts(Path(config.output)).get("compile")
    kept = distributed.from_main(_NOTHING_KEPT if kept is None else _YES if kept else _NO, device)
    wanted = kept == _YES if kept else config.train.compiles(attention_kernel(config, device), config.sharding_stage)
    on_gpu = device.type == "cuda"  # on a CPU nothing is compiled unless it is requested
    lacking = lack(device) if wanted and on_gpu else None
    # All ranks or none: compiled layers round differently, and different GPUs may choose differently.
    others = torch.tensor([float(not wanted), float(not on_gpu or lacking is not None)], device=device)
    unwanted, missing = distributed.reduce_sum(others).tolist()
    if wanted and missing and on_gpu:
        reason = f"{lacking.what} on this machine; {lacking.advice}" if lacking else "another process cannot compile"
        console.warn(
            f"train.compile: the layers are not compiled: {reason}; `cloze doctor` tries it on every machine, "
            "and false leaves it out"
        )
    return replace(config, train=replace(config.train, compile=not unwanted and not missing))


# Rough means of what `cloze plan` finds where half of the best is reached. Within a factor of two they give the numbers
# of GPUs in the recipes' headers. The first two do not shrink with a GPU's share of the batch.
_LAYER_SECONDS = 3.6e-4  # of a layer's small kernels, hooks and sums of gradients
_UPDATE_BYTES = 84  # per parameter, moved by the optimizer and all passes over gradients
_BEST_MFU = 0.45  # share of the peak in the rest of the step


def crowded(
    config: PretrainConfig, world_size: int, flops_of_sample: float, parameters: int, sheet: DataSheet
) -> str | None:
    """A line if the batch is so small that each GPU reaches less than half of its best speed, with the number of GPUs
    that reach it; else None.

    Args:
        flops_of_sample: model FLOPs, forward and backward.
        parameters: of the model, which every GPU updates.
        sheet: of the GPUs.
    """
    layers, batch = config.model.num_hidden_layers, config.train.common_size
    micro_steps = config.train.global_batch_size // batch  # at least: a micro-batch divides the smallest batch, too
    fixed = micro_steps * layers * _LAYER_SECONDS + _UPDATE_BYTES * parameters / sheet.bandwidth
    seconds = config.train.global_batch_size * flops_of_sample / (_BEST_MFU * sheet.flops)  # of one GPU alone
    most = max(count for count in divisors(batch) if count == 1 or seconds / count >= fixed)
    if world_size <= most:
        return None
    return (
        f"train.global_batch_size: found {config.train.global_batch_size:,} on {world_size} GPUs, each busy for "
        f"{seconds / world_size * 1e3:.0f} ms a step; up to {most} reach half of the speed of one alone. Take "
        "fewer GPUs, or a recipe with a larger batch; `cloze plan` estimates both"
    )


def facts_of(config: PretrainConfig, device: torch.device) -> dict[str, object]:
    """The choices that depend on the device by name; `config` is resolved."""
    kernel = attention_kernel(config, device)
    if kernel == "varlen" and has_flash_attention_3():
        kernel += ", flash attention 3"
    return {
        "device": device_name(device),
        "attention kernel": kernel,
        "compile": config.train.compile,
        "micro-batch": config.train.micro_batch_size,
    }


def differences(config: PretrainConfig, before: dict[str, object], now: dict[str, object]) -> str | None:
    """One line about the differences to the device that the run began on; None if no difference changes a result."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return None
    consequence = ["sums are rounded in another way"]
    if "micro-batch" in changed and config.model.drops_hidden:
        consequence.append("dropout drops other units")
    elif "attention kernel" in changed and config.model.attention_probs_dropout_prob:
        consequence.append("attention drops other probabilities")
    changes = ", ".join(f"{name} {before[name]} then, {now[name]} now" for name in changed)
    return f"the run began otherwise: {changes}; {' and '.join(consequence)}"
