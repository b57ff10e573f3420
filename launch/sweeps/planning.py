"""What a sweep runs: every combination of a grid, with its name, command and configuration."""

import itertools
import math
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from cloze.launch.config import RunConfig, TrainConfig
from cloze.launch.run import runs
from cloze.launch.sweeps.run import Run, file_of
from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import dump_yaml

AnyRun = TypeVar("AnyRun", bound=Run)
_MOST_SETTINGS = 10_000  # of a grid: far above what anybody runs, and checked before the list fills the memory


def combinations(grid: list[str], refused: Collection[str] = ()) -> list[dict[str, str]]:
    """Settings of the runs: every combination of the values of `FIELD=a,b,c`.

    Args:
        refused: fields that a grid may not set: they must differ between runs, or must be the same for comparable
            results.

    Raises:
        UserError: a setting of the grid is wrong.

    >>> combinations(["learning_rate=1e-5,2e-5", "epochs=3"])
    [{'train.learning_rate': '1e-5', 'epochs': '3'}, {'train.learning_rate': '2e-5', 'epochs': '3'}]
    """
    axes: dict[str, list[tuple[str, str]]] = {}
    for entry in grid:
        name, _, text = entry.partition("=")
        values = text.split(",")
        if not name or not all(values) or len(set(values)) < len(values):
            raise UserError(
                f"grid: found {entry!r}, expected FIELD=VALUE,VALUE with values that differ, such as "
                "learning_rate=2e-5,3e-5"
            )
        if name in {train.name for train in fields(TrainConfig)}:
            name = f"train.{name}"
        if name in refused or name in axes:
            why = "it is named twice" if name in axes else "it is the same for all runs, or their number"
            raise UserError(f"grid: found {name!r}, expected another field: {why}")
        axes[name] = [(name, value) for value in values]
    if (runs := math.prod(map(len, axes.values()))) > _MOST_SETTINGS:
        raise UserError(
            f"grid: found {runs:,} combinations, expected at most {_MOST_SETTINGS:,}: each is a run of its own"
        )
    return [dict(chosen) for chosen in itertools.product(*axes.values())]


def part_of_name(settings: dict[str, str]) -> str:
    """The part of a run's folder name that its settings determine."""
    text = ",".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in settings.items())
    return re.sub(r"[^\w.=,+-]", "_", text)


def named(settings: dict[str, str]) -> str:
    """A setting as text for tables."""
    return ", ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in settings.items()) or "as configured"


def arguments_of(settings: dict[str, str]) -> list[str]:
    """Settings as the command line takes them."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def command_of(words: Sequence[str], output: Path) -> list[str]:
    """The command of a run with its own configuration."""
    return [sys.executable, "-m", "cloze", *words, "--config", str(file_of(output))]


def with_configurations(sweep: Path, planned: Iterable[tuple[AnyRun, RunConfig]]) -> list[AnyRun]:
    """Each run with the configuration that is written beside its folder when the sweep begins.

    Args:
        sweep: folder of all of them.
        planned: runs and their configurations.

    Raises:
        UserError: two runs have the same folder, or the same settings in other words, as 1e-3 and 0.001; or the sweep's
            folder is that of a single run, whose results and status the sweep's would replace.
    """
    if (sweep / runs.CONFIG).exists():
        raise UserError(
            f"output: found {sweep}, the folder of a single run ({runs.CONFIG}), expected a new one or that of this "
            "sweep; choose another --output"
        )
    taken: set[Path] = set()
    names: dict[str, str] = {}
    checked: list[AnyRun] = []
    for run, config in planned:
        settings = dump_yaml(asdict(config) | {"output": None})
        if (same := names.setdefault(settings, run.name)) != run.name:
            raise UserError(
                f"grid: found {same} and {run.name} with the same settings, expected others; leave one of them out"
            )
        path = file_of(run.folder)
        own = {run.folder, run.log, path}  # the settings a and a.yaml would meet, too
        if shared := own & taken:
            raise UserError(
                f"grid: found two settings whose runs would both write {min(shared)}, expected names that differ; "
                "let one of them be a sweep of its own"
            )
        taken |= own
        checked.append(replace(run, configuration=dump_yaml(asdict(config), sort_keys=False)))
    return checked
