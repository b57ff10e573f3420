"""An interrupted run that goes on: whether it has completed anything, and whether inputs that were touched meanwhile
have the content that it has read.
"""

from collections.abc import Callable
from pathlib import Path

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.reports import load_report, save_report
from cloze.pipeline.jobs.run_folder import BEGUN_AS, take_over
from cloze.pipeline.jobs.source_hashes import SourceHashes, source_hash
from cloze.pipeline.jobs.tokenize_stage import Report, report_name
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.stores.places import Place

_RECORD = "touched.json"  # in a run's folder: when each file was last touched


def has_reports(folder: Place) -> bool:
    """Whether a run has completed a task: each task of either stage ends with its report."""
    return any(path.name.endswith(".json") and path.name != _RECORD for path in folder.iterdir())


def go_on_as(others: list[Place], own: Place) -> bool:
    """Take over what another command has completed of stage 1 alone; False where it has more, or lies in a store, where
    nothing can be renamed.

    Args:
        others: the folders of other runs; empty afterwards.
        own: the folder of this run.
    """
    if len(others) > 1 or not isinstance(others[0], Path) or not isinstance(own, Path):
        return False
    if not all(path.name.startswith("task-") or path.name in (_RECORD, BEGUN_AS) for path in others[0].iterdir()):
        return False
    take_over(others[0], own)
    others.clear()
    return True


def check_touched(
    files: list[InputFile], tasks: list[list[Segment]], hashes: SourceHashes, folder: Place, note: Callable[[str], None]
) -> None:
    """Compare the files that were touched since a run was interrupted with what it has read of them.

    Whoever puts other content in a file's place can restore its size and time of change, but not its ctime. Another
    ctime alone shows no other content: Kubernetes, for one, may set the owner of each file when it mounts a volume.
    Where all of a file was read, its hash decides; where a part of it was, the tasks that read it run again.

    Args:
        files: those of the run by name, size and time of change.
        hashes: gets the digests of the tasks that have read touched files.
        folder: that of the run's reports and parts.
        note: called with messages for the user.

    Raises:
        UserError: a file has other content than the run has read.
    """
    now = [file.touched for file in files]
    kinds = {"touched": lambda value: isinstance(value, list) and len(value) == len(files)}
    record = load_report(folder / _RECORD, kinds)
    before = record["touched"] if record else [None] * len(files)
    if before == now:
        return
    if found := {path.name for path in folder.iterdir()} - {_RECORD, BEGUN_AS}:
        touched = [file for file, time in zip(files, before, strict=True) if file.touched and file.touched != time]
        for number in _to_repeat(touched, tasks, hashes, folder, found, note):
            (folder / report_name(number)).unlink(missing_ok=True)
    save_report(folder / _RECORD, {"touched": now})


def _to_repeat(
    touched: list[InputFile],
    tasks: list[list[Segment]],
    hashes: SourceHashes,
    folder: Place,
    found: set[str],
    note: Callable[[str], None],
) -> set[int]:
    """Tasks that have read parts of touched files. UserError for a file with other content than was read."""
    readers: dict[int, list[int]] = {file.number: [] for file in touched}  # the tasks of each file
    for number, segments in enumerate(tasks):
        for file_number in {segment.file.number for segment in segments} & readers.keys():
            readers[file_number].append(number)
    done = set()
    for number in sorted({number for numbers in readers.values() for number in numbers}):
        path = folder / report_name(number)
        if path.name in found and (report := Report.load(path, len(tasks[number]))) is not None:
            hashes.add(number, report.digests)
            done.add(number)
    # Reports of later stages show that all tasks have read their files. A task without a report then runs again because
    # one of its parts was damaged.
    all_were_read = any(not name.startswith("task-") for name in found)
    used = [file for file in touched if all_were_read or done.intersection(readers[file.number])]
    if used:
        note(f"{len(used):,} files were touched since this run has read them: it compares what is in them")
    repeated = set()
    for file in used:
        if done.issuperset(readers[file.number]):
            read = hashes.of(file)
            same = source_hash(file, read.get("piece_bytes")) == read["sha256"]
        else:
            same = not all_were_read
            repeated |= done.intersection(readers[file.number])
        if not same:
            raise UserError(
                f"{file.path}: changed since an interrupted run has read it, expected the same content; restore it, or "
                "remove the output folder, then run the same command again"
            )
    return repeated
