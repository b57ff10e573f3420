"""Fixes of errors in DeepSpeed, each with the place in its source: whatever of it is replaced is replaced here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import bf16_optimizer

from cloze.launch.engine.fragments import base_optimizer
from cloze.launch.engine.optimizers.groups import Group
from cloze.launch.system import distributed
from cloze.pipeline.errors import UserError


def import_muon_without_compiler() -> None:
    """Import DeepSpeed's Muon, as every ZeRO stage does, without the compiler that its decorators ask for.

    torch.compile imports Inductor at once: a quarter of the time that a start takes. We never run these functions: our
    Muon is in launch/engine/optimizers/.
    """
    compiles = torch.compile
    stand_in: Any = lambda function=None, **_: function or (lambda decorated: decorated)  # noqa: E731
    torch.compile = stand_in
    try:
        with contextlib.suppress(ModuleNotFoundError):  # another version of DeepSpeed, which then has nothing to import
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compiles


def probe_no_operations() -> None:
    """Keep DeepSpeed from probing which of its C++ and CUDA operations could be built (ops/__init__.py,
    __compatible_ops__): each process would call compilers at its start, for the one that communication on a CPU would
    build (comm/torch.py), which only inference uses.
    """
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def show_no_memory() -> None:
    """Keep DeepSpeed's optimizer for bf16 at stage 1 from printing the memory while it is made (bf16_optimizer.py), six
    times, whatever is set; each time it collects garbage first: together more than a second of a start.
    """
    bf16_optimizer.see_memory_usage = lambda *_, **__: None


def forget_left_world() -> None:
    """Remove the group of all ranks that DeepSpeed keeps (utils/groups.py, _WORLD_GROUP) if it is that of an earlier
    run in this process, so that DeepSpeed makes a new one."""
    if (group := deepspeed.utils.groups._WORLD_GROUP) is not None and not distributed.is_joined(group):
        deepspeed.utils.groups._WORLD_GROUP = None


def make_groups_with_timeout() -> None:
    """Let the groups in which stages 1 to 3 reduce gradients wait as long as all others: DeepSpeed (comm/torch.py,
    new_group) takes torch's timeout, which is shorter with NCCL than a checkpoint may take to be verified."""
    deepspeed.comm.comm.cdb.new_group = distributed.new_group


def grow_scale_after_step(optimizer: Any) -> None:
    """Let the gradient of an fp16 step be divided by the scale that its loss was multiplied by.

    DeepSpeed's partitioned optimizers update the scale before they unscale: the gradient of each step at which it grows
    would be halved. Only after an overflow, whose step unscales nothing, is it updated at once.
    """
    update, step = optimizer._update_scale, optimizer.step

    def update_after_overflow(has_overflow: bool) -> None:
        if has_overflow:
            update(True)

    def step_then_grow(*arguments: object, **options: object) -> None:
        step(*arguments, **options)
        if not optimizer.overflow:
            update(False)

    optimizer._update_scale, optimizer.step = update_after_overflow, step_then_grow
    # At the smallest scale it would raise; how many skips in a row are too many is train.max_skipped_steps.
    optimizer.loss_scaler.raise_error_at_min_scale = False


# Fields of DynamicLossScaler that follow from the configuration; its other fields are the current state of the scale.
_SCALE_CONSTANTS = ("scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


@contextlib.contextmanager
def kept_hyper_parameters(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Undo what DeepSpeed's loaders do to the optimizer besides loading its states.

    Its ZeRO-3 universal loader gives every group the hyper-parameters of group 0, and all flat groups one and the
    same `step` tensor, which then advances once for each of them (stage3.py,
    load_hp_checkpoint_state_from_checkpoint_dir_stage3). Its universal loaders leave `step` on the CPU, where torch's
    fused kernels on a GPU do not take it. Where it partitions, it takes the limit of the gradient norm, and the
    constants of the loss scale, from the checkpoint and not from the configuration (stage_1_and_2.py).
    """
    optimizer = base_optimizer(engine)
    partitioned: Any = engine.optimizer if engine.zero_optimization() else None
    limit, scaler = getattr(partitioned, "clip_grad", None), getattr(partitioned, "loss_scaler", None)
    # A group's `step` is no hyper-parameter: DeepSpeed's FusedAdam begins to count there for states not made yet.
    before = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    yield
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    if limit is not None:
        partitioned.clip_grad = limit
    if scaler is not None:
        _restore_scaler(partitioned, scaler)
    _separate_steps(optimizer)


def _restore_scaler(partitioned: Any, scaler: Any) -> None:
    """Give the loss scaler that was loaded the constants of the configured one, which takes its place if it is of
    another kind.
    """
    if type(partitioned.loss_scaler) is not type(scaler):
        # The checkpoint has another precision: its scaler would leave out a scaling, or scale where nothing is scaled.
        partitioned.loss_scaler, partitioned.dynamic_loss_scale = scaler, scaler.dynamic
    for name in _SCALE_CONSTANTS:
        if hasattr(scaler, name):
            setattr(partitioned.loss_scaler, name, getattr(scaler, name))


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter a `step` of its own, on its device if the kernels need it there."""
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            device = parameter.device if optimizer.defaults.get("fused") else state["step"].device
            state["step"] = state["step"].to(device, copy=True)


def check_steps(engine: deepspeed.DeepSpeedEngine, optimizer_steps: int) -> None:
    """Check that all optimizer states that were loaded are of the same step.

    Raises:
        UserError: some are not: they are of another checkpoint.
    """
    states = base_optimizer(engine).state.values()
    steps = [float(state["step"]) for state in states if "step" in state]  # Muon's states have none
    if not engine.zero_optimization():  # at stage 0 a parameter may have begun to learn later than others
        steps = [max(steps)] if steps else []
    if set(steps) - {float(optimizer_steps)}:
        raise UserError(
            f"checkpoint: found optimizer states of step {min(steps):g} to {max(steps):g}, expected {optimizer_steps}, "
            "as its state.json says: its files are of different checkpoints; remove it to resume from an older one"
        )


class _Padding:
    """Stands for a parameter in the loader below, in a group of which this process holds no parameter."""

    @property
    def _hp_mapping(self) -> _Padding:
        return self

    def load_hp_checkpoint_state(self, *arguments: object, **options: object) -> None:
        """It has no step."""

    def get_optim_state_keys(self) -> tuple[()]:
        return ()


@contextlib.contextmanager
def padding_can_be_loaded(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Let DeepSpeed's universal loader of stages 1 and 2 pass groups of which this process has padding alone.

    With hundreds of processes the last ones have no parameter of a small group. The loader asks for the step of their
    first one (base_optimizer.py, load_hp_checkpoint_state_from_checkpoint_dir), which is an IndexError, and would leave
    the group without the states that the next step updates.
    """
    partitioned, method = engine.optimizer, "load_hp_checkpoint_state_from_checkpoint_dir"
    load = getattr(partitioned, method, None)
    if load is None:
        yield
        return

    def load_all(name: str, folder: str) -> None:
        groups, padding = getattr(partitioned, name), _Padding()
        empty = [all(parameter._hp_mapping is None for parameter in group) for group in groups]
        setattr(
            partitioned, name, [[padding] if nothing else group for nothing, group in zip(empty, groups, strict=True)]
        )
        partitioned.param_names[padding] = ""
        try:
            load(name, folder)
        finally:
            setattr(partitioned, name, groups)
            del partitioned.param_names[padding]
        optimizer = base_optimizer(engine)
        whole = [group for group, nothing in zip(optimizer.param_groups, empty, strict=True) if not nothing]
        for group, nothing in zip(optimizer.param_groups, empty, strict=True):
            like = [other for other in whole if other.get("muon") == group.get("muon")]
            if nothing and like:
                _give_states(optimizer, group, like[0])

    setattr(partitioned, method, load_all)
    try:
        yield
    finally:
        delattr(partitioned, method)


def _give_states(optimizer: torch.optim.Optimizer, group: Group, other: Group) -> None:
    """States of a group that is padding: zeros, at the step of another."""
    (padding,), (like,) = group["params"], other["params"]
    optimizer.state[padding] = {
        name: torch.zeros_like(padding) if torch.is_tensor(value) and value.shape == like.shape else deepcopy(value)
        for name, value in optimizer.state[like].items()
    }
