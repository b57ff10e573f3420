"""Checks what is given to `cloze evaluate`, before torch is imported and minutes are spent."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.pretrained.precheck import check_used
from cloze.launch.run import runs
from cloze.launch.system.pictures import check_library
from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.finding import local_files
from cloze.pipeline.storage import check_replaceable, is_same_file, readable_errors
from cloze.pipeline.stores.places import to_local

_TRIES = 100  # to make a file in a folder that others remove: each takes microseconds


def check_inputs(config: EvaluateConfig) -> None:
    """Raise UserError for a missing model (the folder of a checkpoint is checked when it is read) or matplotlib, and
    for a path where no result can be written, or where it would be a text.
    """
    if config.picture:
        check_library("picture")
    for name in ("json", "picture"):
        if path := getattr(config, name):
            check_replaceable(to_local(path, name))
    if config.output:
        to_local(config.output, "output")
    if config.json:
        _check_no_text(config, config.json)
    if Path(config.model).resolve().parent.name != runs.CHECKPOINTS:
        check_used(config)


def _check_no_text(config: EvaluateConfig, name: str) -> None:
    """Raise UserError where results of this name would be one of the texts, of this evaluation or of the next one.

    A file of that name is made, and looked for among those that the suite reads: no rule of names says for all
    patterns and links what is found.
    """
    existed = Path(name).exists()
    with _file_at(Path(name)) as made:
        is_text = any(is_same_file(made, text) for text in _texts(config))
    if is_text and existed:
        raise UserError(f"json: found {name}, the file of the texts, which it would replace, expected another name")
    if is_text:
        raise UserError(
            f"json: found {name} in the folder of the texts, whose next evaluation would read it as one, "
            "expected a name elsewhere"
        )


def _texts(config: EvaluateConfig) -> Iterable[str]:
    """The files that the suite reads, or, of glue, may read."""
    if config.suite == "lines":
        return local_files(config.data)
    return map(str, Path(config.data).glob("*.jsonl" if config.suite == "blimp" else "*/*.tsv"))


@contextmanager
def _file_at(path: Path) -> Iterator[str]:
    """A file of this name, given with links resolved above it. What was made for it is removed again, but not what
    another process puts there meanwhile.
    """
    if lost := next((each for each in path.parents if each.is_symlink() and not each.exists()), None):
        raise UserError(f"{lost}: links to {lost.readlink()}, where nothing is, expected a folder; choose another path")
    path = Path(os.path.realpath(path.parent)) / path.name  # `new/..` is no folder that `new` makes
    missing = [folder for folder in path.parents if not folder.exists()]
    made: os.stat_result | None = None
    with readable_errors(path):
        for left in reversed(range(_TRIES)):  # another process may remove the folder for the same reason
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                made = _make(path)
                break
            except FileNotFoundError:
                if not left:
                    raise
    try:
        yield str(path)
    finally:
        with suppress(OSError):
            if made is not None and os.path.samestat(made, path.stat()):
                path.unlink()
        for folder in missing:
            with suppress(OSError):  # it is not empty, or gone
                folder.rmdir()


def _make(path: Path) -> os.stat_result | None:
    """Make an empty file; None: there is one. Raises OSError if it can't be made."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    try:
        return os.fstat(file)
    finally:
        os.close(file)
