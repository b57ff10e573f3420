"""Conversion of a checkpoint to another number of processes: DeepSpeed's universal form, with each file read once.

The universal form has a folder for each parameter, with a file for the whole fp32 weight and one for each of the
optimizer's states; every process then takes its own part of them (universal_checkpoint.py, stage3.py). DeepSpeed's own
converter (ds_to_universal.py) writes a file for each parameter, state and rank before it merges them: 1.2 million for
BERT-large at stage 3 on 1,024 ranks. Here the ranks' files are mapped into memory, and each whole tensor is written
from there: as many files as there are tensors, whatever the number of ranks, and in the memory of a few tensors.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloze.launch.checkpoint.deepspeed_files import fragment_address, load_own, module_of
from cloze.launch.checkpoint.state import read_state, sharding_stage
from cloze.launch.engine.content import (
    FLAT,
    FLAT_OF_STAGE_3,
    PARTITION,
    SHAPES,
    STATES,
    STATES_OF_STAGE_3,
    OtherContent,
    check_names,
    check_tensor,
    count_in,
    described,
    fields_in,
    list_in,
    of_file,
    step_in,
)
from cloze.pipeline.errors import UserError, reason_of
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import clear, inside

# Files that are read or written at a time: more than one, since a file on a network is waited for.
_THREADS = 8
# Of a rank's part: where the parameters lie in its flat weights (a key of DeepSpeed's, checkpoint/constants.py).
_ADDRESSES = "param_slice_mappings"
# States of the only optimizers that DeepSpeed divides here.
_ADAM = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class _Whole:
    """What all ranks together have of a parameter."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    """Of the weight (fp32) and of each state, in the order of the ranks."""
    step: Any = None
    """Steps that the optimizer has taken."""


def convert_to_universal(folder: Path, target: Path, processes: int) -> None:
    """Write a checkpoint's universal form into `target`.

    Args:
        processes: that will load it. At stage 3 DeepSpeed reads a tensor whole where its elements are no multiple of
            them, so there they are padded.

    Raises:
        UserError: there is too little disk space, or a file holds anything but tensors and plain values.
        OtherContent: a file holds what no run writes.
        OSError: the disk is full or can't be written.
    """
    clear(target, ignore_errors=True)
    needed = sum(path.stat().st_size for path in folder.glob("*.pt"))
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise UserError(
            f"{target}: found {free:,} bytes free, expected at least {needed:,} to convert {folder.name} "
            "for another number of processes; free space, then run the same command again"
        )
    state = read_state(folder)
    is_stage_3, saved_by = sharding_stage(state) == 3, state["world_size"]
    models, ranks = (sorted(folder.glob(f"*_{kind}_states.pt"), key=_rank_of) for kind in ("model", "optim"))
    if not models or len(ranks) != saved_by:
        raise OtherContent(f"it has {len(models)} models and optimizers of {len(ranks)} processes, expected {saved_by}")
    model = load_own(models[0], in_memory=False)
    with of_file(str(models[0])):
        shapes = _shapes_of_stage_3(model) if is_stage_3 else []
        weights = {} if is_stage_3 else module_of(model)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="convert") as threads:
        contents = list(threads.map(_partition_in, ranks))
        wholes: dict[str, _Whole] = {}
        for rank, (path, content) in enumerate(zip(ranks, contents, strict=True)):
            with of_file(str(path)):
                found = _parts_of_stage_3(content, shapes, rank, len(ranks)) if is_stage_3 else _parts(content)
                for name, step, parts in found:
                    whole = wholes.setdefault(name, _Whole(step=step))
                    if step is not None and float(step) != float(whole.step):
                        raise OtherContent(f"found the steps {float(whole.step):g} and {float(step):g} of {name:.100}")
                    for key, part in parts.items():
                        whole.parts.setdefault(key, []).append(part)
        if not is_stage_3:
            _check_sizes(wholes, weights)
            for name, weight in weights.items():  # what has no states has a weight
                wholes.setdefault(name, _Whole({"fp32": [weight.float().flatten()]}))
        for name in wholes:
            inside(target, name)
        multiple = processes if is_stage_3 else None
        try:
            for name in wholes:
                (target / "zero" / name).mkdir(parents=True)
            list(threads.map(lambda item: _write(target / "zero" / item[0], item[1], multiple), wholes.items()))
            torch.save(_common(contents[0], is_stage_3), target / "zero" / "optimizer_state.pt")
            shutil.copy2(models[0], target)  # the one that every process reads
        except RuntimeError as error:  # torch's, for a disk that is full
            clear(target, ignore_errors=True)
            raise UserError(
                f"{target}: found {folder.name} good but could not write its form for another number of "
                f"processes ({reason_of(error)}), expected room and permission there; fix this, then run the same "
                "command again"
            ) from error


def _rank_of(path: Path) -> int:
    """Rank by the name of a file, as bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt; 0 of the one of all ranks."""
    digits = path.name.partition("zero_pp_rank_")[2].partition("_")[0]
    return int(digits) if digits.isdecimal() else 0


def _partition_in(path: Path) -> Fields:
    """A rank's part of the optimizer."""
    with of_file(str(path)):
        return fields_in(load_own(path, in_memory=False).get(PARTITION), PARTITION)


def _shapes_of_stage_3(model: Fields) -> list[dict[str, torch.Size]]:
    """The shapes of the parameters of each group, by their names."""
    groups = model.get(SHAPES)
    groups = list_in(groups, SHAPES, len(groups) if isinstance(groups, list) else 0)
    for group in groups:
        for name, shape in fields_in(group, SHAPES).items():
            if not isinstance(name, str) or not isinstance(shape, torch.Size):
                raise OtherContent(f"{SHAPES} has {name!r:.60}: {described(shape)}, expected a shape by its name")
    return list(groups)


def _check_sizes(wholes: dict[str, _Whole], weights: dict[str, Tensor]) -> None:
    """Raise OtherContent unless all parts of a parameter together are as large as its weight in the model's file."""
    for name, whole in wholes.items():
        for key, parts in whole.parts.items():
            size, expected = sum(map(len, parts)), weights[name].numel() if name in weights else 0
            if size != expected:
                raise OtherContent(f"found {size:,} values of {key} of {name:.100}, expected {expected:,}")


def _flat_groups(content: Fields, flat_key: str, states_key: str) -> Iterator[tuple[int, Fields, Tensor]]:
    """Number, states and weights of each flat group of a rank; its states are those of Adam."""
    fields_in(content, PARTITION, (flat_key, states_key))
    flats = content[flat_key]
    flats = list_in(flats, flat_key, len(flats) if isinstance(flats, list) else 0)
    optimizer = fields_in(content[states_key], states_key, ("state", "param_groups"))
    states = fields_in(optimizer["state"], f"{states_key}.state")
    if states.keys() != set(range(len(flats))):
        raise OtherContent(f"{states_key}.state has others than those of {len(flats)} groups")
    for number, flat in enumerate(flats):
        if not isinstance(flat, Tensor):
            raise OtherContent(f"{flat_key}.{number} is {described(flat)}, expected a tensor")
        check_tensor(flat, f"{flat_key}.{number}", [flat.numel()], torch.float32)
        state = fields_in(states[number], f"{states_key}.state.{number}")
        check_names(state, f"{states_key}.state.{number}", _ADAM)
        for key in _ADAM[1:]:
            size = state[key].numel() if isinstance(state[key], Tensor) else 0
            check_tensor(state[key], f"{states_key}.state.{number}.{key}", [size], torch.float32)
        step_in(state["step"], f"{states_key}.state.{number}.step", number=True)
        yield number, state, flat


def _parts(content: Fields) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Name, step and parts (N,) of a rank's parameters at stages 1 and 2: fragments of flat groups."""
    groups = list(_flat_groups(content, FLAT, STATES))
    all_addresses = list_in(content.get(_ADDRESSES), _ADDRESSES, len(groups))
    for (number, states, flat), addresses in zip(groups, all_addresses, strict=True):
        whole = _of_elements(states, flat)
        for name, address in fields_in(addresses, f"{_ADDRESSES}.{number}").items():
            if not isinstance(name, str) or not isinstance(address, fragment_address):
                raise OtherContent(
                    f"{_ADDRESSES}.{number} has {name!r:.60}, expected places of parameters by their names"
                )
            shortest = min(map(len, whole.values()))
            start = count_in(address.start, f"the start of {name:.100}", 0, shortest)
            size = count_in(address.numel, f"the size of {name:.100}", 0, shortest - start)
            yield name, states["step"], {key: value.narrow(0, start, size) for key, value in whole.items()}


def _parts_of_stage_3(
    content: Fields, groups: Sequence[dict[str, torch.Size]], rank: int, ranks: int
) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """The same at stage 3, which divides each parameter into equal parts, the last ones with padding."""
    flat_groups = list(_flat_groups(content, FLAT_OF_STAGE_3, STATES_OF_STAGE_3))
    list_in(flat_groups, FLAT_OF_STAGE_3, len(groups))
    for (_, states, flat), shapes in zip(flat_groups, groups, strict=True):
        whole = _of_elements(states, flat)
        start = 0
        for name, shape in shapes.items():
            size = math.ceil(shape.numel() / ranks)
            real = max(0, min(size, shape.numel() - rank * size))
            if start + real > (found := min(map(len, whole.values()))):
                raise OtherContent(f"found {found:,} values of a group, expected {start + real:,} up to {name:.100}")
            yield name, None, {key: value.narrow(0, start, real) for key, value in whole.items()}
            start += size


def _of_elements(states: Fields, flat: Tensor) -> dict[str, Tensor]:
    """The weights of a group (N,) and the states that have a value for each; some have none for what pads the group."""
    return {"fp32": flat} | {key: states[key] for key in _ADAM[1:]}


def _write(folder: Path, whole: _Whole, multiple: int | None) -> None:
    """Write the files of a parameter.

    Args:
        multiple: at stage 3, to which the number of elements is padded; None: at the others, whose files name what they
            hold.
    """
    for key, parts in whole.parts.items():
        values = torch.cat([*parts, parts[0].new_zeros(-sum(map(len, parts)) % (multiple or 1))])
        torch.save(values if multiple else {"param": values}, folder / f"{key}.pt")
    if whole.step is not None:
        torch.save(whole.step, folder / "step.pt")


def _common(content: Fields, is_stage_3: bool) -> Fields:
    """What a rank's file says of all ranks: settings of the optimizer and the scale of the loss."""
    key = STATES_OF_STAGE_3 if is_stage_3 else STATES
    common = {name: value for name, value in content.items() if name not in (key, FLAT, _ADDRESSES, FLAT_OF_STAGE_3)}
    groups = content[key]["param_groups"]
    steps = {number: {"step": state.get("step")} for number, state in content[key]["state"].items()}
    return common | {"param_groups": groups} | ({key: {"state": steps, "param_groups": groups}} if is_stage_3 else {})
