"""metrics.jsonl of a run, read: its lines, and those that stay at a resume."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from cloze.launch.run.runs import METRICS
from cloze.pipeline.bounds import MOST
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import check_regular, is_number, load_json, naming

_NEWEST_BYTES = 1 << 16  # at the end of metrics.jsonl: some hundred lines
# Of a line, which has some hundred figures, and with 3,000 sources several of each: half a megabyte.
_MOST_LINE_BYTES = 1 << 24
BUFFER_BYTES = 1 << 20  # read at once: a line of zeros of gigabytes is passed over at the disk's speed


def iterate_metrics(folder: Path) -> Iterator[Fields]:
    """The lines of a run's metrics.jsonl except damaged ones; the last line may be incomplete. One line is in memory at
    a time, however large the file is.
    """
    check_regular(folder / METRICS)
    with naming(folder / METRICS), open(folder / METRICS, "rb", buffering=BUFFER_BYTES) as file:
        yield from good_lines(file)


def read_metrics(folder: Path) -> list[Fields]:
    """The same as a list, for runs that are known to be small."""
    return list(iterate_metrics(folder))


def newest_metrics(folder: Path) -> Fields | None:
    """The newest line of a run's metrics.jsonl that has its loss; None: there is none yet."""
    check_regular(folder / METRICS)
    try:
        with naming(folder / METRICS), open(folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - _NEWEST_BYTES))
            lines = lines_of(file.read())
    except FileNotFoundError:
        return None
    return next((line for line in reversed(lines) if line.get("train/loss") is not None), None)


def lines_of(content: bytes) -> list[Fields]:
    """The lines of a piece of a metrics.jsonl except damaged ones; the first and the last may be incomplete."""
    return list(good_lines(io.BytesIO(content)))


def good_lines(file: BinaryIO) -> Iterator[Fields]:
    """Each line of a metrics.jsonl in turn except damaged ones."""
    return (line for line in parsed_lines(file) if line is not None)


def parsed_lines(file: BinaryIO) -> Iterator[Fields | None]:
    """Each line of a metrics.jsonl in turn, None for a damaged one; an incomplete last line does not count as damaged.

    Of a line that is longer than any that is written no more than a piece is in memory.
    """
    while line := file.readline(_MOST_LINE_BYTES):
        too_long = len(line) == _MOST_LINE_BYTES
        while len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(_MOST_LINE_BYTES)
        parsed = None if too_long else metrics_of(line)
        if parsed is not None or line.endswith(b"\n"):
            yield parsed


def metrics_of(line: bytes) -> Fields | None:
    """Content of a line of metrics.jsonl: a step, and values by curve, null for one that was not finite; None if the
    line is damaged.
    """
    try:
        values = load_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or type(step := values.get("step")) is not int or not 0 <= step <= MOST:
        return None
    return values if all(value is None or is_number(value) for value in values.values()) else None


def kept_lines(lines: list[Fields], step: int, evaluated_step: int) -> list[Fields]:
    """The lines that stay when a run resumes from a step.

    Args:
        evaluated_step: step of the last evaluation before it.
    """
    return [line for line in lines if is_kept(line, step, evaluated_step)]


def is_kept(line: Fields, step: int, evaluated_step: int) -> bool:
    """Whether a line stays when a run resumes from a step, as `kept_lines`."""
    return bool(line["step"] <= (evaluated_step if is_evaluation(line) else step))


def is_evaluation(line: Mapping[str, object]) -> bool:
    """Whether a line of metrics.jsonl has the figures of an evaluation."""
    return any(name.startswith("validation/") for name in line)
