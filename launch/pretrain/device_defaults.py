"""Defaults that depend on the device, except the micro-batch (probing.py): chosen at the first start, then saved.

A run that resumes on another device keeps these choices, or prints one line about the differences.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from dataclasses import replace
from pathlib import Path

import torch

from cloze.launch.config import PretrainConfig
from cloze.launch.engine.config import PRECISIONS
from cloze.launch.run import runs
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import device_name, has_flash_attention_3
from cloze.launch.system.environment import c_compiler
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
    lacking = _lacking(device) if wanted else None
    # All ranks or none: compiled layers round differently, and different GPUs may choose differently.
    others = torch.tensor([float(not wanted), float(lacking is not None)], device=device)
    unwanted, missing = distributed.reduce_sum(others).tolist()
    if wanted and missing and device.type == "cuda":
        console.warn(
            f"train.compile: the layers are not compiled, since {lacking or 'another process'} lacks what "
            "that takes; install Triton, a C compiler and Python's headers, or set it to false"
        )
    return replace(config, train=replace(config.train, compile=not unwanted and not missing))


def _lacking(device: torch.device) -> str | None:
    """What this machine lacks for torch.compile on its GPU, or None; on a CPU nothing is compiled unless it is
    requested.
    """
    if device.type != "cuda":
        return "a GPU"
    if importlib.util.find_spec("triton") is None:
        return "this environment, without Triton,"
    if not c_compiler():
        return "this machine, without a C compiler,"
    # Triton compiles its interface to CUDA's driver at its first kernel.
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "this machine, without Python.h,"
    try:
        _compile_one(device)
    except Exception as error:  # of Inductor, Triton, the C compiler, the linker, or CUDA's assembler
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"this machine, on which a kernel of one addition ended with {reason!r},"
    return None


def _compile_one(device: torch.device) -> None:
    """Compile and run a trivial kernel; any error means that nothing can be compiled here."""
    torch.compile(lambda values: values + 1, fullgraph=True)(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)


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
