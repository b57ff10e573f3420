"""The files of a checkpoint as DeepSpeed asks for them: their content is handed to functions of ours."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor

from cloze.launch.engine.content import (
    FLAT,
    FLAT_OF_STAGE_3,
    PARTITION,
    SHAPES,
    STATES,
    STATES_OF_STAGE_3,
    OtherContent,
    check_groups,
    check_like,
    check_names,
    check_optimizer,
    check_state,
    check_tensor,
    count_in,
    fields_in,
    list_in,
    of_file,
    takes_numbers,
    version_in,
)
from cloze.launch.engine.fragments import base_optimizer

Content = dict[str, Any]
"""Tensors and plain values by name."""
Submit = Callable[[Content, Path], None]
"""Takes the content of a file, live tensors of the engine included, and its path."""
Read = Callable[[str], Content]
"""Returns the content of a file."""


class CheckpointFiles(CheckpointEngine):
    """DeepSpeed's interface for writing and reading files, over two functions."""

    def __init__(self, submit: Submit | None = None, read: Read | None = None) -> None:
        super().__init__()
        self.name = "cloze"
        self._submit, self._read = submit, read

    def create(self, info: object) -> None:
        """Does nothing: there is nothing to prepare."""

    def save(self, state_dict: Content, path: str) -> None:
        assert self._submit is not None, "made for reading"
        partition = state_dict.get(PARTITION)
        if isinstance(partition, dict) and "partition_count" in partition:
            # BF16_Optimizer, which DeepSpeed uses for bf16 at stage 1, omits this entry, which DeepSpeed's own tools
            # need.
            partition.setdefault("zero_stage", 1)
        self._submit(state_dict, Path(path))

    def load(self, path: str, map_location: object = None) -> Content:
        assert self._read is not None, "made for writing"
        return self._read(path)

    def commit(self, info: object) -> bool:
        return True


# Further keys of DeepSpeed's files, and what of a partition its loaders look for.
_FOLDING = "folding"
_PADDINGS, _PARTITION_GROUPS = "param_alignment_paddings", "ds_zero_partition_groups"
_SETTINGS = ("dynamic_loss_scale", "overflow", "clip_grad")
_COUNTS = ("dp_world_size", "mp_world_size", "global_steps", "skipped_steps")


@contextlib.contextmanager
def loading(engine: deepspeed.DeepSpeedEngine, folder: Path, read: Read, steps: int) -> Iterator[Content]:
    """Context in which DeepSpeed loads a checkpoint: what it is given was checked, and so is what it has made of files
    of any number of processes, which it reads itself. Yields what will be the content of the model's file, once that
    was read; at stages 1 to 3, where DeepSpeed takes all of it, nothing.

    Args:
        steps: that the optimizer has made.

    Raises:
        OtherContent: the files hold what this engine would not write.
    """

    model_file: Content = {}

    def read_checked(path: str) -> Content:
        content = read(path)
        with of_file(path):
            _check_loaded(engine, content, path, steps)
        if not engine.zero_optimization():  # where no other file is read
            model_file.update(content)
        return content

    models = engine._get_all_ckpt_names(str(folder.parent), folder.name)
    if len(models) != 1:
        raise OtherContent(f"it has {len(models)} files of the model, expected one")
    engine.checkpoint_engine = CheckpointFiles(read=read_checked)
    converted = engine.load_universal_checkpoint()
    if converted:
        _check_converted(engine, folder, read)
    yield model_file
    if converted:
        _check_states(engine, steps)


def _check_loaded(engine: deepspeed.DeepSpeedEngine, content: Content, path: str, steps: int) -> None:
    """Check the content of a file before DeepSpeed takes it: a model's, or a rank's partition of the optimizer."""
    if _FOLDING in content:
        raise OtherContent(f"it has {_FOLDING}, expected none")
    if path.endswith("_model_states.pt"):
        _check_model(engine, content)
    else:
        partition = fields_in(content.get(PARTITION), PARTITION)
        _check_partition(engine, partition, steps)


def _check_model(engine: deepspeed.DeepSpeedEngine, content: Content) -> None:
    fields_in(content, "it", ("module", *_COUNTS))
    for name in _COUNTS:
        count_in(content[name], name)
    count_in(content.get("global_samples", 0), "global_samples")
    count_in(content["mp_world_size"], "mp_world_size", 1, 1)
    weights, own = fields_in(content["module"], "module"), engine.module.state_dict()
    if engine.load_universal_checkpoint():  # DeepSpeed takes the weights from files of their own, made of this content
        weights = {name: weights[name] for name in own if name in weights}
    elif engine.zero_optimization():
        processes = engine.dp_world_size
        count_in(content["dp_world_size"], "dp_world_size", processes, processes)
    if engine.load_universal_checkpoint() and engine.zero_optimization_stage() == 3:
        found = content.get(SHAPES)
        shapes = {name: shape for group in found or () for name, shape in fields_in(group, SHAPES).items()}
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and shapes.get(name) != parameter.ds_shape:
                raise OtherContent(f"{name} has the shape {shapes.get(name)}, expected {parameter.ds_shape}")
        return
    check_names(weights, "module", own)
    for name, tensor in own.items():
        check_tensor(weights[name], f"module.{name}", tensor.shape, tensor.dtype)


def _check_converted(engine: deepspeed.DeepSpeedEngine, folder: Path, read: Read) -> None:
    """Check what a checkpoint in the form for any number of processes says of all of them."""
    found, own = read(str(folder / "zero" / "optimizer_state.pt")), engine.optimizer.state_dict()
    _check_settings(found, own)
    of_stage_3 = FLAT_OF_STAGE_3 in own
    groups = (fields_in(found.get(STATES_OF_STAGE_3), STATES_OF_STAGE_3) if of_stage_3 else found).get("param_groups")
    own_groups = own[STATES_OF_STAGE_3 if of_stage_3 else STATES]["param_groups"]
    check_groups(groups, "param_groups", own_groups, places=False)  # those of other numbers of processes are others


def _check_states(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    """Check the states that an engine has loaded from converted files, as `check_state`."""
    optimizer = base_optimizer(engine)
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        numbers = takes_numbers(optimizer)
        check_state(state, f"state {number}", parameter, muon=False, steps=steps, number=numbers)


def _check_settings(found: Content, own: Content) -> None:
    for name in _SETTINGS:
        if name in own and name in found:
            check_like(found[name], name, own[name])
    if "loss_scaler" in found and "loss_scaler" in own:
        _check_scaler(found["loss_scaler"], own["loss_scaler"])
    if "ds_version" in own:
        version_in(found.get("ds_version"), "ds_version")


def _check_partition(engine: deepspeed.DeepSpeedEngine, found: Content, steps: int) -> None:
    partitioned, optimizer = engine.optimizer, base_optimizer(engine)
    own: Content = partitioned.state_dict()
    of_stage_3 = FLAT_OF_STAGE_3 in own
    states, flat = (STATES_OF_STAGE_3, FLAT_OF_STAGE_3) if of_stage_3 else (STATES, FLAT)
    read = ("loss_scaler", "dynamic_loss_scale", "overflow") if of_stage_3 else ()
    fields_in(found, PARTITION, (states, flat, *read))
    _check_settings(found, own)
    if _PADDINGS in found and _PADDINGS in own:
        check_like(found[_PADDINGS], _PADDINGS, own[_PADDINGS])
        if found[_PADDINGS] != own[_PADDINGS]:
            raise OtherContent(f"{_PADDINGS} is another, expected that of zero_optimization.parameter_alignment")
    if found.get(_PARTITION_GROUPS) is not None and _PARTITION_GROUPS not in own:
        raise OtherContent(f"it has {_PARTITION_GROUPS}, expected none")
    if of_stage_3:  # between its calls the groups of the optimizer are empty
        parameters: list[Tensor] = list(partitioned.fp32_partitioned_groups_flat)
    else:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
    groups = list_in(found[flat], flat, len(own[flat]))
    for number, (group, without_padding) in enumerate(zip(groups, own[flat], strict=True)):
        # DeepSpeed pads what was written without padding; in another precision a run writes it with.
        padded = isinstance(group, Tensor) and group.shape == parameters[number].shape
        like = parameters[number] if padded else without_padding
        check_tensor(group, f"{flat}.{number}", like.shape, like.dtype)
    if isinstance(own[states], dict):  # otherwise the user has chosen zero_optimization.elastic_checkpoint
        check_optimizer(
            found[states],
            states,
            own[states]["param_groups"],
            parameters,
            steps=steps,
            number=takes_numbers(optimizer),
            whole=True,
        )


def _check_scaler(found: object, own: object) -> None:
    """Check a loss scaler, of which the loaders take all attributes."""
    if not isinstance(found, LossScalerBase):  # another precision's is not taken over
        raise OtherContent("loss_scaler is none")
    if type(found) is not type(own):
        return
    check_names(vars(found), "loss_scaler", vars(own))
    for name, value in vars(own).items():
        there = vars(found)[name]
        check_like(there, f"loss_scaler.{name}", value)
        if isinstance(there, float) and not math.isfinite(there) or name == "cur_scale" and not there > 0:
            raise OtherContent(f"loss_scaler.{name} is {there}, expected a finite number, of cur_scale above 0")
