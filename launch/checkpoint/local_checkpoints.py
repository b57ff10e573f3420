"""Checkpoints of a run in a store that are still complete on its machines' local disks, and need no download.

Each machine has the files of its own processes. With `checkpoint.local` a job that starts again on the same machines
(`slurm-multi-node-store.sbatch`, with scratch that outlasts the job) repeats few steps although uploads are rare. On
several machines all must hold parts of one and the same checkpoint, which is compared here.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from cloze.launch.checkpoint.fetching import Files, owner_of
from cloze.launch.checkpoint.state import CHECKSUMS, STATE, damage, hash_of_files, read_state, saved_alike, write_state
from cloze.launch.system import distributed
from cloze.pipeline.storage import clear, readable_errors, sha256_of
from cloze.pipeline.untrusted import read_json

# Additional entries of state.json: the start that saved the checkpoint, and the hash of the files of all processes
# (`files_hash` is that of the files in this machine's folder).
ATTEMPT, WHOLE = "attempt", "whole_hash"


@dataclass(frozen=True)
class Found:
    """The undamaged files of a checkpoint on one machine."""

    step: int
    whole: str
    """Hash of the files of all processes; it differs from start to start and from step to step."""
    files: Files


def found_on(folders: list[Path], world_size: int, stage: int | None, attempt: str) -> list[Found]:
    """The checkpoints in these folders that are undamaged and were saved at the same world size and stage by a start
    not older than `attempt`.
    """
    found = []
    for folder in folders:
        if damage(folder) is not None:
            continue
        state = read_state(folder)
        if WHOLE in state and saved_alike(state, world_size, stage) and state[ATTEMPT] >= attempt:
            checksums = read_json(folder / CHECKSUMS)
            files = {name: tuple(each) for name, each in checksums.items() if name != STATE}
            found.append(Found(state["step"], state[WHOLE], files))
    return found


def whole_on_all(by_machine: list[list[Found]], machines: list[list[int]]) -> list[Found] | None:
    """For the newest checkpoint that is complete over all machines, with each process's files on its machine: the part
    of each machine. None if there is no such checkpoint.

    Args:
        by_machine: checkpoints found on each machine, newest first.
        machines: the ranks on each.
    """
    for first in by_machine[0]:
        parts = [each for found in by_machine for each in found if (each.step, each.whole) == (first.step, first.whole)]
        if len(parts) < len(by_machine):  # each machine has at most one checkpoint of a step
            continue
        files: dict[str, tuple[int, str]] = {
            name: (size, digest) for part in parts for name, (size, digest) in part.files.items()
        }
        misplaced = any(
            owner_of(name) in ranks and name not in part.files
            for name in files
            for part, ranks in zip(parts, machines, strict=True)
        )
        if hash_of_files(files) == first.whole and not misplaced:
            return parts
    return None


def take_shared(folder: Path, parts: list[Found], machines: list[list[int]], rank: int, device: torch.device) -> bool:
    """Copy the files that all processes need to the machines that lack them. Collective.

    Args:
        folder: folder of the checkpoint on each machine.
        parts: files of the checkpoint on each machine.

    Returns:
        Whether they arrived undamaged.

    Raises:
        UserError: a disk is full or can't be written.
    """
    shared = {name: each for part in parts for name, each in part.files.items() if owner_of(name) is None}
    if all(shared.keys() <= part.files.keys() for part in parts):
        return True
    own = next(number for number, ranks in enumerate(machines) if rank in ranks)
    lacking = rank == min(machines[own]) and not shared.keys() <= parts[own].files.keys()
    aside = folder.with_name(folder.name + ".shared.tmp")
    with distributed.together("make room for a checkpoint", aside, device), readable_errors(aside):
        if lacking:
            clear(aside, ignore_errors=True)
            aside.mkdir()
            for name in parts[own].files:
                os.link(folder / name, aside / name)
    arrived = True
    for name, (size, digest) in sorted(shared.items()):
        source = min(next(ranks for part, ranks in zip(parts, machines, strict=True) if name in part.files))
        wanted = lacking and name not in parts[own].files
        with distributed.together("copy a checkpoint", aside, device), readable_errors(aside):
            distributed.copy_file(folder / name, size, source, aside / name if wanted else None, device)
        arrived = arrived and (not wanted or sha256_of(aside / name) == digest)
    if distributed.on_any_rank(not arrived, device):
        return False
    with distributed.together("take up a checkpoint", folder, device), readable_errors(folder):
        if lacking:
            write_state(aside, parts[own].files | shared, read_state(folder))
            clear(folder)
            os.replace(aside, folder)
    return True
