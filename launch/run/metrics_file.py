"""metrics.jsonl of a run, read: its lines, and those that stay at a resume."""

import io
from collections.abc import Mapping
from pathlib import Path

from cloze.launch.run.runs import METRICS
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import check_regular, load_json

_NEWEST_BYTES = 1 << 16  # at the end of metrics.jsonl: some hundred lines


def read_metrics(folder: Path) -> list[Fields]:
    """The lines of a run's metrics.jsonl except damaged ones; the last line may be incomplete."""
    check_regular(folder / METRICS)
    return lines_of((folder / METRICS).read_bytes())[0]


def newest_metrics(folder: Path) -> Fields | None:
    """The newest line of a run's metrics.jsonl that has its loss; None: there is none yet."""
    try:
        with open(folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - _NEWEST_BYTES))
            lines, _ = lines_of(file.read())
    except FileNotFoundError:
        return None
    return next((line for line in reversed(lines) if line.get("train/loss") is not None), None)


def lines_of(content: bytes) -> tuple[list[Fields], int]:
    """The lines of the content of a metrics.jsonl, and the number of damaged ones, which are left out; an incomplete
    last line does not count as damaged.
    """
    *whole, last = content.split(b"\n")
    parsed = [metrics_of(line) for line in whole]
    lines = [line for line in (*parsed, metrics_of(last)) if line is not None]
    return lines, parsed.count(None)


def metrics_of(line: bytes) -> Fields | None:
    """Content of a line of metrics.jsonl: a step, and values by curve, null for one that was not finite; None if the
    line is damaged.
    """
    try:
        values = load_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return None
    return values if all(value is None or isinstance(value, (int, float)) for value in values.values()) else None


def kept_lines(lines: list[Fields], step: int, evaluated_step: int) -> list[Fields]:
    """The lines that stay when a run resumes from a step.

    Args:
        evaluated_step: step of the last evaluation before it.
    """
    return [line for line in lines if line["step"] <= (evaluated_step if is_evaluation(line) else step)]


def is_evaluation(line: Mapping[str, object]) -> bool:
    """Whether a line of metrics.jsonl has the figures of an evaluation."""
    return any(name.startswith("validation/") for name in line)
