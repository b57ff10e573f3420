"""Checkpoints on the local disks of a run's machines, each with the files of its own processes: which checkpoint is
complete over all machines, so that it need not be downloaded from the store.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from cloze.launch.checkpoint.fetching import Files, owner_of
from cloze.launch.checkpoint.state import CHECKSUMS, STATE, damage, describe, hash_of_files, read_state
from cloze.launch.system import distributed
from cloze.pipeline.storage import readable_errors, sha256_of

# Entries of state.json beside those of any checkpoint: the start that saved it, and the hash of the files of all
# processes, where `files_hash` is that of the files in the folder.
ATTEMPT, WHOLE = "attempt", "whole_hash"


@dataclass(frozen=True)
class Found:
    """What a machine has of a checkpoint, as it was written."""

    step: int
    whole: str
    """Hash of the files of all processes: those of another start's, or of another step's, have another one."""
    files: Files


def found_on(folders: list[Path], world_size: int, attempt: str) -> list[Found]:
    """Those of the folders of checkpoints whose files are undamaged, which as many processes saved, and a start no
    older than `attempt`."""
    found = []
    for folder in folders:
        if damage(folder) is not None:
            continue
        state = read_state(folder)
        if WHOLE in state and state["world_size"] == world_size and state[ATTEMPT] >= attempt:
            checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
            files = {name: tuple(each) for name, each in checksums.items() if name != STATE}
            found.append(Found(state["step"], state[WHOLE], files))
    return found


def whole_on_all(by_machine: list[list[Found]], machines: list[list[int]]) -> list[Found] | None:
    """Of the newest checkpoint that is whole over all machines, with each process's own files on its machine, what each
    machine has; None: there is no such.

    Args:
        by_machine: what each has, newest first.
        machines: the ranks on each.
    """
    for first in by_machine[0]:
        parts = [each for found in by_machine for each in found if (each.step, each.whole) == (first.step, first.whole)]
        if len(parts) < len(by_machine):  # of a step each machine has one at most
            continue
        files: dict[str, tuple[int, str]] = {
            name: (size, digest) for part in parts for name, (size, digest) in part.files.items()}
        misplaced = any(owner_of(name) in ranks and name not in part.files
                        for name in files for part, ranks in zip(parts, machines, strict=True))
        if hash_of_files(files) == first.whole and not misplaced:
            return parts
    return None


def take_shared(folder: Path, parts: list[Found], machines: list[list[int]], rank: int, device: torch.device) -> bool:
    """Copy the files that all processes need to the machines that lack them; whether they arrived. Collective.

    Args:
        folder: of the checkpoint, on each machine.
        parts: what each machine has of it.

    Raises:
        UserError: a disk is full or refuses.
    """
    shared = {name: each for part in parts for name, each in part.files.items() if owner_of(name) is None}
    if all(shared.keys() <= part.files.keys() for part in parts):
        return True
    own = next(number for number, ranks in enumerate(machines) if rank in ranks)
    lacking = rank == min(machines[own]) and not shared.keys() <= parts[own].files.keys()
    aside = folder.with_name(folder.name + ".shared.tmp")
    with distributed.together("make room for a checkpoint", aside, device), readable_errors(aside):
        if lacking:
            shutil.rmtree(aside, ignore_errors=True)
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
    if distributed.reduce_sum(torch.tensor(float(not arrived), device=device)).item():
        return False
    with distributed.together("take up a checkpoint", folder, device), readable_errors(folder):
        if lacking:
            describe(aside, parts[own].files | shared, read_state(folder))
            shutil.rmtree(folder)
            os.replace(aside, folder)
    return True
