"""Runs over a grid of settings: every combination in a process of its own; statistics of the results."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from cloze.launch.config import EvaluationConfig, TrainConfig
from cloze.launch.run import runs
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system.console import Console, figure
from cloze.launch.system.environment import child_variables
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text

RESULTS = "results.json"  # of a run; in the folder of a sweep, of all its runs
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Run:
    """One setting with one seed."""

    name: str
    """Of its folder, under that of all."""
    folder: Path
    settings: dict[str, str]
    """What differs from the other runs, as written in the grid."""
    command: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """The file with the run's output."""
        return self.folder.with_name(self.folder.name + ".log")

    def results(self) -> Fields | None:
        """results.json of a complete run, or None."""
        if runs.read_status(self.folder).get("state") != "complete" or not (self.folder / RESULTS).exists():
            return None
        return runs.read_fields(self.folder / RESULTS)


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
        if name in {each.name for each in fields(TrainConfig)}:
            name = f"train.{name}"
        if name in refused or name in axes:
            why = "it is named twice" if name in axes else "it is the same for all runs, or their number"
            raise UserError(f"grid: found {name!r}, expected another field: {why}")
        axes[name] = [(name, value) for value in values]
    return [dict(chosen) for chosen in itertools.product(*axes.values())]


def part_of_name(settings: dict[str, str]) -> str:
    """The part of a run's folder name that its settings determine."""
    text = ",".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in settings.items())
    return re.sub(r"[^\w.=,+-]", "_", text)


def file_of(output: Path) -> Path:
    """The file with a run's configuration, beside its folder."""
    return output.with_name(output.name + ".yaml")


def num_complete(planned: Sequence[Run]) -> int:
    """Number of runs that have a result."""
    return sum(run.results() is not None for run in planned)


def reach_end(
    folder: Path,
    planned: Sequence[Run],
    devices: list[str],
    console: Console,
    summarize: Callable[[], Fields],
    draw: Callable[[Fields], None],
) -> Fields | None:
    """Run all runs of a sweep, holding the folder's lock, and write `results.json` and a picture.

    Args:
        devices: as of `run_all`.
        summarize: makes the results of all runs, with their number as `n`.
        draw: called with the results after they are written.

    Returns:
        The results, or None if a signal stopped the sweep.

    Raises:
        UserError: no run has a result, or another job holds the folder.
    """
    with runs.locked(folder):
        runs.set_status(folder, "running", num_complete(planned))
        if run_all(planned, devices, console):
            runs.set_status(folder, "requeue", num_complete(planned))
            console.say(
                f"stopped with {num_complete(planned)} of {len(planned)} runs complete; the same command continues"
            )
            return None
        summary = summarize()
        publish_text(folder / RESULTS, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        if not summary["n"]:
            runs.set_status(folder, "failed", 0)
            raise UserError(f"{folder}: none of the {len(planned)} runs has a result; {planned[0].log} says why")
        draw(summary)
        runs.set_status(folder, "complete", num_complete(planned))
    return summary


def run_all(planned: Sequence[Run], devices: list[str], console: Console) -> bool:
    """Run the incomplete runs, one process at a time on each device.

    Args:
        devices: values of CUDA_VISIBLE_DEVICES; an empty one selects no device.

    Returns:
        Whether a signal stopped it.

    Stop signals are forwarded, so that each run leaves a checkpoint. A run still active from a sweep that was killed is
    waited for.
    """
    waiting = [run for run in planned if run.results() is None]
    if done := len(planned) - len(waiting):
        console.say(f"{done} of {len(planned)} runs are complete already")
    running: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}
    reported: list[str] = []
    passed_on = False
    with StopRequest() as stop:
        while running or (waiting and not stop.wanted):
            left_behind = [run.name for run in waiting if runs.in_use(run.folder)]
            if left_behind not in ([], reported):
                console.say(f"waiting for {', '.join(left_behind)}, still at work since an earlier start")
                reported = left_behind
            for device in devices:
                if device not in running and waiting and not left_behind and not stop.wanted:
                    run = waiting.pop(0)
                    running[device] = run, _start(run, device)
            time.sleep(_POLL_SECONDS)
            if stop.wanted and not passed_on:
                passed_on = True  # once only: a second signal would end the runs without a checkpoint
                for _, process in running.values():
                    process.terminate()
            for device, (run, process) in list(running.items()):
                if process.poll() is not None:
                    del running[device]
                    _say_end(run, process.returncode, passed_on, console)
            waiting = [run for run in waiting if run.results() is None]
        return stop.wanted and any(run.results() is None for run in planned)


def _start(run: Run, device: str) -> subprocess.Popen[bytes]:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    variables = child_variables(**({"CUDA_VISIBLE_DEVICES": device} if device else {}))
    with open(run.log, "a", encoding="utf-8") as log:
        return subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def _say_end(run: Run, status: int, stopped: bool, console: Console) -> None:
    results = run.results()
    if results is not None:
        console.say(f"{run.name}: {results['metric']} {shown(results['validation'][results['metric']])}")
    elif stopped:
        console.say(f"{run.name}: stopped")
    else:
        console.warn(f"{run.name}: failed with status {status}: {last_line(run.log)}")


def last_line(log: Path) -> str:
    """The last line of a run's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def statistics_of(values: dict[str, float]) -> Fields:
    """Median, mean and standard deviation of the runs' values, and the values by run."""
    numbers = list(values.values())
    return {
        "median": statistics.median(numbers),
        "mean": statistics.fmean(numbers),
        # sample standard deviation, with n - 1
        "deviation": statistics.stdev(numbers) if len(numbers) > 1 else None,
        "n": len(numbers),
        "values": values,
    }


def best_of(found: list[tuple[float, str]], evaluation: EvaluationConfig, label: str) -> Fields | None:
    """The best of pairs (value, name); of equal values the first."""
    best: tuple[float, str] | None = None
    for value, name in found:
        if best is None or evaluation.is_better(value, best[0]):
            best = value, name
    return None if best is None else {"value": best[0], label: best[1]}


def named(settings: dict[str, str]) -> str:
    """A setting as text for tables."""
    return ", ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in settings.items()) or "as configured"


def shown(value: float | None) -> str:
    """A value as text for tables."""
    return "-" if value is None or math.isnan(value) else figure(value)
