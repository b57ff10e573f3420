"""Reading checkpoints of runs in an object store: which files a checkpoint has, and downloads for other commands."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cloze.launch.checkpoint.state import describe
from cloze.launch.checkpoint.transfer import Damaged, fetch, part_name, parts_of
from cloze.launch.run import runs
from cloze.launch.run.commits import Commit, read_commits
from cloze.launch.run.stored import COMMITS, fetch_description, fetch_objects
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.stores.scratch import scratch_folder

INDEX = "index.json"
_OWNER = re.compile(r"(?:.*_)?pp_rank_(\d+)_.*|(?:ema-)?rank-(\d+)\.pt")

# Name of a file -> its size and SHA-256.
Files = dict[str, tuple[int, str]]


def step_place(place: StorePath, step: int) -> StorePath:
    """Where all that was uploaded of a step lies."""
    return place / f"step-{step:08d}"


def owner_of(name: str) -> int | None:
    """The rank that alone wrote a file and needs it, at the same number of processes; None: a file for all."""
    found = _OWNER.fullmatch(name)
    return int(found[1] or found[2]) if found else None


def read_index(place: StorePath, step: int, commit: Commit) -> dict:
    """The index of a committed checkpoint: `state` and `files`.

    Raises:
        Damaged: it, or an object of the checkpoint, is missing or not as it was written.
        UserError: the store can't be used.
    """
    folder = step_place(place, step) / commit.folder
    try:
        data = (folder / INDEX).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{INDEX} is missing") from error
    if hashlib.sha256(data).hexdigest() != commit.digest:
        raise Damaged(f"{INDEX} has another SHA-256 than when it was written")
    index = json.loads(data)
    if missing := missing_part(folder, index["files"]):
        raise Damaged(missing)
    return index


def missing_part(folder: StorePath, files: Files) -> str | None:
    """Which part of a file is not there with its size; None: all are."""
    start = len(folder.key) + 1
    sizes = {each.key[start:]: each.size for each in folder.objects()}
    for name, (size, _) in files.items():
        for number, (first, last) in enumerate(parts_of(size)):
            part = part_name(name, number)
            if sizes.get(part) != last - first:
                return f"{part} is missing" if part not in sizes else (
                    f"{part} has {sizes[part]} bytes, expected {last - first}")
    return None


def fetch_run(place: StorePath, step: int | Literal["best"] | None = None, count: int = 1,
              warn: Callable[[str], None] = print, folder: Path | None = None) -> Path:
    """A folder of this machine that looks like a run's, with the checkpoints that are asked for, or of a finished
    fine-tuning its model.

    Args:
        step: None: the newest that is good; best: that of the best evaluation which the newest one knows of, and it.
        count: how many more than this one - 1 of those before it are fetched too.
        folder: an empty one to take; None: one that goes with this process.

    Raises:
        UserError: there is no run, no such checkpoint, or it is damaged.
    """
    folder = folder or scratch_folder()
    fetch_description(place, folder)
    if not (folder / runs.CONFIG).exists():
        raise UserError(f"{place}: found no run of `cloze pretrain` or `cloze finetune`, expected its {runs.CONFIG}; "
                        "look at the name")
    if (place / runs.MODEL / "config.json").is_file():
        start = len(place.key) + 1
        fetch_objects(place, [each.key[start:] for each in (place / runs.MODEL).objects()], folder)
        return folder
    if "train_file" in runs.fields_of(folder):
        raise UserError(f"{place}: found a run of `cloze finetune` without its model, which it leaves at its end, "
                        "expected a complete one; the command that started it goes on with it")
    commits = read_commits(place / runs.CHECKPOINTS / COMMITS)
    if isinstance(step, int):
        newest = step if step in commits and _fetched(place, folder, step, commits, warn) else None
    else:
        newest = next((each for each in sorted(commits, reverse=True) if _fetched(place, folder, each, commits, warn)),
                      None)
    if newest is None:
        found = ", ".join(map(str, sorted(commits))) or "none"
        raise UserError(f"{place}: no good checkpoint{f' of step {step}' if isinstance(step, int) else ''}; the run "
                        f"has {found}")
    if step == "best":
        state = json.loads((folder / runs.CHECKPOINTS / f"step-{newest:08d}" / "state.json").read_text())
        newest = state["best_step"]
        if newest in commits:
            _fetched(place, folder, newest, commits, warn)
    for each in sorted(each for each in commits if each < newest)[::-1][: count - 1]:
        _fetched(place, folder, each, commits, warn)
    return folder


def _fetched(place: StorePath, folder: Path, step: int, commits: dict[int, Commit], warn: Callable[[str], None]
             ) -> bool:
    """Whether a whole checkpoint is there, fetched now or before; a damaged one is reported."""
    place = place / runs.CHECKPOINTS
    target = folder / runs.CHECKPOINTS / f"step-{step:08d}"
    if target.exists():
        return True
    with readable_errors(target):
        target.mkdir(parents=True)
        try:
            index = read_index(place, step, commits[step])
            for name, (size, digest) in index["files"].items():
                fetch(step_place(place, step) / commits[step].folder, size, digest, target / name)
        except Damaged as damage:
            warn(f"{place}: step {step} is damaged ({damage}); passed over")
            target.rename(target.with_name(target.name + ".tmp"))
            return False
        describe(target, {name: tuple(each) for name, each in index["files"].items()}, index["state"])
    return True
