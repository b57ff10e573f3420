"""Run fine-tuning commands in fresh processes that need not import for seconds: DeepSpeed serves one run a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cloze.launch.commands import parse
from tests.forked import ForkedRun
from tests.launch.finetune.small import QUICK
from tests.launching import finish


def arguments(task, model, train, validation, output, *overrides) -> list[str]:
    """What follows `cloze` on the command line of a run."""
    return [
        "finetune",
        task,
        "--model",
        str(model),
        "--train",
        str(train),
        "--validation",
        str(validation),
        "--output",
        str(output),
        *QUICK,
        *map(str, overrides),
    ]


def command(*words) -> list[str]:
    """The command of a run in a process of its own."""
    return [sys.executable, "-m", "cloze", *arguments(*words)]


def finetune(task, model, train, validation, output, *overrides, processes: int = 1) -> tuple[dict, str]:
    """Run to the end; returns the results and what was printed."""
    said = finish(ForkedRun(arguments(task, model, train, validation, output, *overrides), processes))
    return json.loads((Path(output) / "results.json").read_text()), said


def lines(path: Path) -> list[dict]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells(table: str) -> list[list[str]]:
    """Rows of a table in Markdown, its header first, the line below it left out."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.strip().split("\n")]
    return rows[:1] + rows[2:]


def config_of(*overrides):
    return parse("finetune", ["sst2", "--model", "m", "--train", "t", "--validation", "v", "--output", "o", *overrides])
