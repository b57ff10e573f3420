"""Conversion of a checkpoint to another number of processes: DeepSpeed's universal form, with each file read once.

The universal form has a folder for each parameter, with a file for the whole fp32 weight and one for each of the
optimizer's states; every process then takes its own part of them (universal_checkpoint.py, stage3.py). DeepSpeed's own
converter (ds_to_universal.py) writes a file for each parameter, state and rank before it merges them: 1.2 million for
BERT-large at stage 3 on 1,024 ranks. Here the ranks' files are mapped into memory, and each whole tensor is written
from there: as many files as there are tensors, whatever the number of ranks, and in the memory of a few tensors.
"""

import math
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cloze.launch.checkpoint.deepspeed_files import MODEL_FILE, load_pickled, only_tensors
from cloze.launch.checkpoint.state import read_state, sharding_stage
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

# Files that are read or written at a time: more than one, since a file on a network is waited for.
_THREADS = 8
# Of the parts of a rank, what is no longer needed beside them: keys of DeepSpeed's files (checkpoint/constants.py).
_STATES, _FLAT, _ADDRESSES = "base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"
_STATES_OF_STAGE_3, _FLAT_OF_STAGE_3 = "optimizer_state_dict", "fp32_flat_groups"


@dataclass
class _Whole:
    """What all ranks together have of a parameter."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    """Of the weight (fp32) and of each state, in the order of the ranks."""
    step: object = None
    """Steps that the optimizer has taken."""


def convert_to_universal(folder: Path, target: Path, processes: int) -> None:
    """Write a checkpoint's universal form into `target`.

    Args:
        processes: that will load it. At stage 3 DeepSpeed reads a tensor whole where its elements are no multiple of
            them, so there they are padded.

    Raises:
        UserError: there is too little disk space, or the checkpoint holds anything but tensors.
        OSError: the disk is full or can't be written.
    """
    shutil.rmtree(target, ignore_errors=True)
    needed = sum(path.stat().st_size for path in folder.glob("*.pt"))
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise UserError(
            f"{target}: found {free:,} bytes free, expected at least {needed:,} to convert {folder.name} "
            "for another number of processes; free space, then run the same command again"
        )
    is_stage_3 = sharding_stage(read_state(folder)) == 3
    models, ranks = (sorted(folder.glob(f"*_{kind}_states.pt"), key=_rank_of) for kind in ("model", "optim"))
    model = load_pickled(models[0], in_memory=False)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="convert") as threads:
        contents = list(threads.map(lambda path: load_pickled(path, in_memory=False)["optimizer_state_dict"], ranks))
        wholes: dict[str, _Whole] = {}
        for rank, (path, content) in enumerate(zip(ranks, contents, strict=True)):
            with only_tensors(path):
                shapes = model["param_shapes"] if is_stage_3 else ()
                found = _parts_of_stage_3(content, shapes, rank, len(ranks)) if is_stage_3 else _parts(content)
                for name, step, parts in found:
                    whole = wholes.setdefault(name, _Whole())
                    whole.step = step
                    for key, part in parts.items():
                        whole.parts.setdefault(key, []).append(part)
        if not is_stage_3:  # what has no states has a weight
            for name, weight in model["module"].items():
                wholes.setdefault(name, _Whole({"fp32": [weight.float().flatten()]}))
        multiple = processes if is_stage_3 else None
        try:
            for name in wholes:
                (target / "zero" / name).mkdir(parents=True)
            list(threads.map(lambda item: _write(target / "zero" / item[0], item[1], multiple), wholes.items()))
            torch.save(_common(contents[0], is_stage_3), target / "zero" / "optimizer_state.pt")
            shutil.copy2(models[0], target)  # the one that every process reads
        except RuntimeError as error:  # torch's, for a disk that is full
            shutil.rmtree(target, ignore_errors=True)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{target}: found {folder.name} good but could not write its form for another number of "
                f"processes ({reason}), expected room and permission there; fix this, then run the same "
                "command again"
            ) from error


def _rank_of(path: Path) -> int:
    """Rank by the name of a file, as bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt; 0 of the one of all ranks."""
    return 0 if path.name == MODEL_FILE else int(path.name.partition("zero_pp_rank_")[2].partition("_")[0])


def _parts(content: Fields) -> Iterator[tuple[str, object, dict[str, Tensor]]]:
    """Name, step and parts (N,) of a rank's parameters at stages 1 and 2: fragments of flat groups."""
    for number, (flat, addresses) in enumerate(zip(content[_FLAT], content[_ADDRESSES], strict=True)):
        states = content[_STATES]["state"][number]
        whole = _of_elements(states, flat)
        for name, address in addresses.items():
            parts = {key: value.narrow(0, address.start, address.numel) for key, value in whole.items()}
            yield name, states.get("step"), parts


def _parts_of_stage_3(
    content: Fields, groups: Iterable[dict[str, torch.Size]], rank: int, ranks: int
) -> Iterator[tuple[str, object, dict[str, Tensor]]]:
    """The same at stage 3, which divides each parameter into equal parts, the last ones with padding."""
    for number, (flat, shapes) in enumerate(zip(content[_FLAT_OF_STAGE_3], groups, strict=True)):
        whole = _of_elements(content[_STATES_OF_STAGE_3]["state"][number], flat)
        start = 0
        for name, shape in shapes.items():
            size = math.ceil(shape.numel() / ranks)
            real = max(0, min(size, shape.numel() - rank * size))
            yield name, None, {key: value.narrow(0, start, real) for key, value in whole.items()}
            start += size


def _of_elements(states: Fields, flat: Tensor) -> dict[str, Tensor]:
    """The weights of a group (N,) and the states that have a value for each; some have none for what pads the group."""
    each = {key: value for key, value in states.items() if torch.is_tensor(value) and value.dim() and key != "step"}
    return {"fp32": flat, **each}


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
    key = _STATES_OF_STAGE_3 if is_stage_3 else _STATES
    common = {name: value for name, value in content.items() if name not in (key, _FLAT, _ADDRESSES, _FLAT_OF_STAGE_3)}
    groups = content[key]["param_groups"]
    steps = {number: {"step": state.get("step")} for number, state in content[key]["state"].items()}
    return common | {"param_groups": groups} | ({key: {"state": steps, "param_groups": groups}} if is_stage_3 else {})
