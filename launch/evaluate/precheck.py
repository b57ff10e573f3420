"""Checks what is given to `cloze evaluate`, before torch is imported and minutes are spent."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.pretrained.precheck import check_used
from cloze.launch.run import runs
from cloze.launch.system.pictures import check_library
from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.finding import local_files
from cloze.pipeline.storage import check_replaceable, is_same_file, readable_errors


def check_inputs(config: EvaluateConfig) -> None:
    """Raise UserError for a missing model (the folder of a checkpoint is checked when it is read) or matplotlib, and
    for a path where no result can be written, or where it would be a text.
    """
    if config.picture:
        check_library("picture")
    for path in (config.json, config.picture):
        if path:
            check_replaceable(Path(path))
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
    with _file_at(Path(name)):
        is_text = any(is_same_file(name, text) for text in _texts(config))
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
def _file_at(path: Path) -> Iterator[None]:
    """A file of this name; it and its folders are removed again if they were not there."""
    made = [each for each in (path, *path.parents) if not each.exists()]
    with readable_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        yield
    finally:
        for each in made:
            each.unlink() if each is path else each.rmdir()
