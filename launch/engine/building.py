"""Builds DeepSpeed's engine of a model."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError
from torch import nn

from cloze.launch.config import RunConfig
from cloze.launch.engine.config import Settings
from cloze.launch.engine.optimizers import build_optimizer
from cloze.launch.engine.optimizers.groups import Group
from cloze.launch.engine.repairs import (
    forget_left_world,
    grow_scale_after_step,
    import_muon_without_compiler,
    make_groups_with_timeout,
    probe_no_operations,
    show_no_memory,
)
from cloze.launch.engine.versions import check_deepspeed
from cloze.pipeline.errors import UserError, reason_of


def build_deepspeed(
    model: nn.Module, config: RunConfig, settings: Settings, device: torch.device, groups: list[Group] | None = None
) -> deepspeed.DeepSpeedEngine:
    """Wrap the model; its parameters move to `device` and, for bf16 and fp16 above stage 0, become 16-bit.

    Args:
        settings: DeepSpeed's, made by `deepspeed_config`.
        groups: what the optimizer updates; None: all of the model's parameters.

    Raises:
        UserError: an untested DeepSpeed, fp16 on a device that has none, or DeepSpeed refuses what the section
            deepspeed adds.
    """
    check_deepspeed()
    _check_fp16(settings, device)
    # Its warnings about its own internals are not the user's to fix; its errors raise.
    deepspeed_logger.setLevel(logging.ERROR)
    probe_no_operations()
    show_no_memory()
    import_muon_without_compiler()
    model.to(device)
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    forget_left_world()
    make_groups_with_timeout()
    on_cpu = "offload_optimizer" in settings["zero_optimization"]
    optimizer = build_optimizer(model, config.optimizer, config.train.peak_rate, states_on_cpu=on_cpu, groups=groups)
    try:
        # Without device_rank it takes the GPU numbered LOCAL_RANK, also where each process sees one GPU alone.
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, args=SimpleNamespace(device_rank=device.index or 0)
        )
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError, DeepSpeedConfigError) as error:
        if not config.deepspeed:
            raise  # the user has added no setting that could be wrong
        raise _refusal(error) from error
    _check_read(settings, config.deepspeed)
    if engine.fp16_enabled():
        grow_scale_after_step(engine.optimizer)
    return engine


def _check_read(settings: Settings, added: Settings) -> None:
    """Raise UserError for the first setting of the user's that DeepSpeed does not look at."""
    noting = NotingDict(settings)  # a copy: the engine's own settings are saved in every checkpoint
    DeepSpeedConfig(noting)
    if (unread := noting.unread(added)) is not None:
        raise UserError(
            f"deepspeed.{unread}: found a setting that DeepSpeed does not read in such a run, expected one "
            "that it knows; see its configuration reference"
        )


class NotingDict(dict[str, Any]):
    """A nested dict that records which names are read. DeepSpeed ignores most names that it does not know: without
    this a misspelt setting of the section `deepspeed` would have no effect and no error.
    """

    def __init__(self, values: Settings) -> None:
        super().__init__(
            {name: NotingDict(value) if isinstance(value, dict) else value for name, value in values.items()}
        )
        self.asked: set[object] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # so that `**section` asks for each name, instead of copying all at once

    def get(self, name: str, default: object = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def unread(self, added: Settings) -> str | None:
        """Dotted path of the first name among `added` that no code has read, or None. A section of which no
        single name was read counts as read as a whole."""
        for name, value in added.items():
            if self.asked and name not in self.asked:
                return str(name)
            if isinstance(value, dict) and (inner := dict.__getitem__(self, name).unread(value)) is not None:
                return f"{name}.{inner}"
        return None


def _refusal(error: Exception) -> UserError:
    """DeepSpeed's error about its configuration, in one line."""
    if isinstance(error, ValidationError):  # pydantic's error: DeepSpeed reads most settings with it
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        return UserError(
            f"deepspeed: found {where} = {found['input']!r}, expected a setting that DeepSpeed knows "
            f"({found['msg']}); see its configuration reference"
        )
    return UserError(
        f"deepspeed: found settings that DeepSpeed refuses ({reason_of(error)}), expected others; see its "
        "configuration reference"
    )


def _check_fp16(settings: Settings, device: torch.device) -> None:
    if settings.get("fp16", {}).get("enabled") and device.type != "cuda":
        raise UserError(f"train.precision: found fp16, expected bf16 or fp32 on {device.type}: only GPUs train in fp16")
