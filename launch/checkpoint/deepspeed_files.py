"""DeepSpeed's files of a checkpoint: how they are written, read, converted and made whole.

Pickled files are read here and only here, and nothing but tensors comes out of them.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from launch.checkpoint.state import read_state
from launch.engine import base_optimizer
from launch.environment import forbid_pickled_code
from launch.saving import BackgroundWriter
from pipeline.errors import UserError

# Everything but tensors that DeepSpeed's files hold. A file with any other class in it is refused, by our loads and by
# DeepSpeed's own: from the import of this module on, so that Python programs are as safe as our commands.
forbid_pickled_code()
ALLOWED_CLASSES = [LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum]
torch.serialization.add_safe_globals(ALLOWED_CLASSES)


@contextlib.contextmanager
def only_tensors(path: str | Path) -> Iterator[None]:
    """Turn torch's refusal of anything but tensors, plain values and ALLOWED_CLASSES into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; mend this, then run the same command again") from error
    except Exception as error:  # torch raises many kinds here; every one means the same to the user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: found something other than tensors or a damaged file, expected a checkpoint; it was "
                        f"not loaded ({reason})") from error


def load_pickled(path: str | Path) -> dict:
    """Tensors and plain values of a file of torch.save, on the CPU.

    Raises:
        UserError: the file holds anything else, or is damaged.
    """
    with only_tensors(path):
        return torch.load(path, map_location="cpu", weights_only=True)


class DurableCheckpointEngine(CheckpointEngine):
    """DeepSpeed's files through a BackgroundWriter on the way out and weights_only on the way in."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cloze"
        self.writer = BackgroundWriter()

    def create(self, info) -> None:
        """Nothing to prepare."""

    def save(self, state_dict, path: str) -> None:
        partition = state_dict.get("optimizer_state_dict")
        if isinstance(partition, dict) and "partition_count" in partition:
            # BF16_Optimizer, which DeepSpeed takes for bf16 at stage 1, forgets it; its own tools ask for it.
            partition.setdefault("zero_stage", 1)
        self.writer.submit(state_dict, Path(path))

    def load(self, path: str, map_location=None) -> dict:
        return load_pickled(path)

    def commit(self, info) -> bool:
        return True


# Of DynamicLossScaler, what the configuration says; the rest is where the scale stands.
_SCALE_CONSTANTS = ("scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


@contextlib.contextmanager
def kept_hyper_parameters(engine, optimizer_steps: int) -> Iterator[None]:
    """Undo what DeepSpeed's loaders do to the optimizer, and prove it.

    Its ZeRO-3 universal loader gives every group the hyper-parameters of group 0, and all flat groups one and the
    same `step` tensor, which then advances once for each of them (stage3.py,
    load_hp_checkpoint_state_from_checkpoint_dir_stage3). Its universal loaders leave `step` on the CPU, where torch's
    fused kernels on a GPU do not take it. Where it partitions, it takes the limit of the gradient norm, and the
    constants of the loss scale, from the checkpoint and not from the configuration (stage_1_and_2.py).
    """
    optimizer = base_optimizer(engine)
    partitioned = engine.optimizer if engine.zero_optimization() else None
    limit, scaler = getattr(partitioned, "clip_grad", None), getattr(partitioned, "loss_scaler", None)
    # A group's `step` is no hyper-parameter: where states that DeepSpeed's FusedAdam has yet to make begin to count.
    before = [{name: value for name, value in group.items() if name not in ("params", "step")}
              for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    if limit is not None:
        partitioned.clip_grad = limit
    if scaler is not None and type(partitioned.loss_scaler) is not type(scaler):
        # The checkpoint is of another precision: its scaler would not scale, or would where nothing is to be scaled.
        partitioned.loss_scaler, partitioned.dynamic_loss_scale = scaler, scaler.dynamic
    for name in _SCALE_CONSTANTS:
        if hasattr(scaler, name):
            setattr(partitioned.loss_scaler, name, getattr(scaler, name))
    steps = []
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            device = parameter.device if optimizer.defaults.get("fused") else state["step"].device
            state["step"] = state["step"].to(device, copy=True)
        if "step" in state:  # Muon's states have none
            steps.append(float(state["step"]))
    if not engine.zero_optimization():  # there a parameter may have begun to learn later than others
        steps = [max(steps)] if steps else []
    if set(steps) - {float(optimizer_steps)}:
        raise RuntimeError(f"the optimizer was loaded at steps {sorted(set(steps))}, expected {optimizer_steps}")


class _Padding:
    """What the loader below asks of a parameter, for a group of which this process has none."""

    @property
    def _hp_mapping(self) -> _Padding:
        return self

    def load_hp_checkpoint_state(self, *arguments, **options) -> None:
        """It has no step."""

    def get_optim_state_keys(self) -> tuple[()]:
        return ()


@contextlib.contextmanager
def padding_can_be_loaded(engine) -> Iterator[None]:
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
        setattr(partitioned, name, [[padding] if nothing else group
                                    for nothing, group in zip(empty, groups, strict=True)])
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


def _give_states(optimizer: torch.optim.Optimizer, group: dict, other: dict) -> None:
    """States of a group that is padding: zeros, at the step of another."""
    (padding,), (like,) = group["params"], other["params"]
    optimizer.state[padding] = {
        name: torch.zeros_like(padding) if torch.is_tensor(value) and value.shape == like.shape else deepcopy(value)
        for name, value in optimizer.state[like].items()
    }


def convert_to_universal(folder: Path, target: Path) -> None:
    """Write a checkpoint's universal form, from which any number of processes can load, into `target`.

    Raises:
        UserError: there is too little room for it, or the checkpoint holds anything but tensors.
        OSError: the disk is full or refuses.
    """
    shutil.rmtree(target, ignore_errors=True)
    # The parts of all tensors and the whole ones lie there at once.
    needed = 2 * sum(path.stat().st_size for path in folder.glob("*.pt"))
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise UserError(f"{target}: found {free:,} bytes free, expected at least {needed:,} to convert {folder.name} "
                        "for another number of processes; free space, then run the same command again")
    arguments = Namespace(
        input_folder=str(folder), output_folder=str(target), keep_temp_folder=False, strict=True,
        # One worker runs in this process. Stages 1 and 2 lack what the converter wants of newer files.
        num_extract_workers=1, num_merge_workers=1, inject_missing_state=read_state(folder)["zero_stage"] < 3,
    )
    try:
        with _silence():
            ds_to_universal.main(arguments)
    except (MemoryError, OSError):
        raise
    except Exception as error:
        shutil.rmtree(target, ignore_errors=True)
        for path in sorted(folder.glob("*.pt")):  # torch says the same of what it cannot read and cannot write
            load_pickled(path)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{target}: found {folder.name} good but could not write its form for another number of "
                        f"processes ({reason}), expected room and permission there; mend this, then run the same "
                        "command again") from error
    (target.parent / "latest_universal").unlink(missing_ok=True)  # a note of the converter, which nothing here reads


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """fp32 weights of a checkpoint, whole, from any ZeRO stage."""
    stage = read_state(folder)["zero_stage"]
    # At stage 3 a process has a part of it; below, all, though at stages 1 and 2 in the precision of the run.
    weights = {} if stage == 3 else load_pickled(folder / "mp_rank_00_model_states.pt")["module"]
    if stage:
        with only_tensors(folder), _silence():
            # At stage 1 DeepSpeed leaves out what does not learn.
            weights |= get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    return {name: tensor.float() for name, tensor in weights.items()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """DeepSpeed's tools print their progress."""
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        yield
