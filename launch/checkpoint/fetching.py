"""Reading checkpoints of runs in an object store: which files a checkpoint has, and downloads for other commands."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cloze.launch.checkpoint.state import fault_of_state, read_state, write_state
from cloze.launch.checkpoint.transfer import Damaged, fetch, part_name, parts_of
from cloze.launch.run import runs
from cloze.launch.run.commits import Commit, read_commits
from cloze.launch.run.stored_run import COMMITS, fetch_description, fetch_objects, keys_below
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import inside, readable_errors
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.stores.temporary_folders import temporary_folder
from cloze.pipeline.untrusted import load_json

INDEX = "index.json"
_OWNER = re.compile(r"(?:.*_)?pp_rank_(\d+)_.*|(?:(?:ema-)?rank|optimizer)-(\d+)\.pt")

# Of one file; the list of its parts takes 100 MB there. Encoders have files of gigabytes.
_MOST_BYTES = 1 << 46

# Name of a file -> its size and SHA-256.
Files = dict[str, tuple[int, str]]


def step_place(place: StorePath, step: int) -> StorePath:
    """The folder of all uploads of a step."""
    return place / runs.step_name(step)


def owner_of(name: str) -> int | None:
    """The rank that wrote a file and alone needs it at the same world size and stage; None: all ranks need the file."""
    match = _OWNER.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def read_index(place: StorePath, step: int, commit: Commit) -> Fields:
    """The index of a committed checkpoint: `state` and `files`.

    Raises:
        Damaged: the index or an object of the checkpoint is missing or differs from what was written.
        UserError: the store can't be used.
    """
    folder = step_place(place, step) / commit.folder
    try:
        data = (folder / INDEX).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{INDEX} is missing") from error
    if hashlib.sha256(data).hexdigest() != commit.digest:
        raise Damaged(f"{INDEX} has another SHA-256 than when it was written")
    try:
        index: Fields = load_json(data)
        if (fault := fault_of_state(index["state"])) or index["state"]["step"] != step:
            raise Damaged(f"{INDEX}: state: {fault or 'it is that of another step'}")
        if index["folder"] != commit.folder:
            raise Damaged(f"{INDEX}: found the folder {index['folder']!s:.100}, expected its own")
        for name, (size, digest) in index["files"].items():
            inside(Path(INDEX), name)
            if type(size) is not int or not 0 <= size <= _MOST_BYTES or not isinstance(digest, str):
                raise Damaged(f"{INDEX} has no size and SHA-256 of {name}")
        missing = missing_parts(folder, index["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{INDEX} is not what was written ({error!s:.200})") from error
    if missing:
        raise Damaged(next(iter(missing.values())))
    return index


def missing_parts(folder: StorePath, files: Files) -> dict[str, str]:
    """The parts of files that are missing or have the wrong size, each with a text that says which of it."""
    start = len(folder.key) + 1
    sizes = {each.key[start:]: each.size for each in folder.objects()}
    expected = sizes_of_parts(files)
    return {
        part: f"{part} has {sizes[part]} bytes, expected {size}" if part in sizes else f"{part} is missing"
        for part, size in expected.items()
        if sizes.get(part) != size
    }


def sizes_of_parts(files: Files) -> dict[str, int]:
    """The size of each part by its name."""
    return {
        part_name(name, number): last - first
        for name, (size, _) in files.items()
        for number, (first, last) in enumerate(parts_of(size))
    }


def fetch_run(
    place: StorePath,
    step: int | Literal["best"] | None = None,
    count: int = 1,
    *,
    warn: Callable[[str], None],
    folder: Path | None = None,
) -> Path:
    """Download checkpoints of a run, or the model of a complete fine-tuning run, into a local folder with the layout of
    a run.

    Args:
        step: None: the newest good one; best: the one of the best evaluation, by the newest one, which is fetched too.
        count: number of checkpoints: this one and `count` - 1 before it.
        folder: an empty folder for it; None: a temporary folder, removed with this process.

    Raises:
        UserError: there is no run, no such checkpoint, or it is damaged.
    """
    folder = folder or temporary_folder(place)
    fetch_description(place, folder)
    if not (folder / runs.CONFIG).exists():
        raise UserError(
            f"{place}: found no run of `cloze pretrain` or `cloze finetune`, expected its {runs.CONFIG}; "
            "look at the name"
        )
    if (place / runs.MODEL / "config.json").is_file():
        fetch_objects(place, [*keys_below(place, runs.MODEL), runs.RESULTS], folder)  # with the model's hashes
        return folder
    if "train_file" in runs.fields_of(folder):
        raise UserError(
            f"{place}: found a run of `cloze finetune` without its model, which is written at the end, "
            "expected a complete one; the command that started it resumes it"
        )
    commits = read_commits(place / runs.CHECKPOINTS / COMMITS)
    if isinstance(step, int):
        newest = step if step in commits and _fetched(place, folder, step, commits, warn) else None
    else:
        newest = next(
            (saved for saved in sorted(commits, reverse=True) if _fetched(place, folder, saved, commits, warn)), None
        )
    if newest is None:
        found = ", ".join(map(str, sorted(commits))) or "none"
        raise UserError(
            f"{place}: no good checkpoint{f' of step {step}' if isinstance(step, int) else ''}; the run has {found}"
        )
    if step == "best":
        newest = read_state(folder / runs.CHECKPOINTS / runs.step_name(newest)).get("best_step", -1)
        if newest in commits:
            _fetched(place, folder, newest, commits, warn)
    for earlier in sorted(saved for saved in commits if saved < newest)[::-1][: count - 1]:
        _fetched(place, folder, earlier, commits, warn)
    return folder


def _fetched(
    place: StorePath, folder: Path, step: int, commits: dict[int, Commit], warn: Callable[[str], None]
) -> bool:
    """Fetch a checkpoint unless it is there already. A damaged one is reported.

    Returns:
        Whether it is complete.
    """
    place = place / runs.CHECKPOINTS
    target = folder / runs.CHECKPOINTS / runs.step_name(step)
    if target.exists():
        return True
    with readable_errors(target):
        target.mkdir(parents=True)
        try:
            index = read_index(place, step, commits[step])
            for name, (size, digest) in index["files"].items():
                fetch(step_place(place, step) / commits[step].folder, size, digest, inside(target, name))
        except Damaged as damage:
            warn(f"{place}: step {step} is damaged ({damage}); skipped")
            target.rename(target.with_name(target.name + ".tmp"))
            return False
        write_state(target, {name: tuple(each) for name, each in index["files"].items()}, index["state"])
    return True
