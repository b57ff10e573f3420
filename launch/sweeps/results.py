"""What the runs of a sweep have reached together: a file, a table and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloze.launch.config.metrics import lower_is_better
from cloze.launch.run import runs
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.run_locks import locked
from cloze.launch.run.status_file import recording_failure, set_status
from cloze.launch.sweeps.pictures import DrawnSetting, draw_sweep
from cloze.launch.sweeps.planning import named
from cloze.launch.sweeps.pool import run_all
from cloze.launch.sweeps.run import Results, Run, fault_in_runs, last_line, no_better, shown
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_json

PICTURE = "curves.png"


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid in one folder."""

    folder: Path
    runs: Sequence[Run]
    measured: str
    """When the runs are measured: at the end, or at the best checkpoint."""
    facts: Fields = field(default_factory=dict)
    """What the results say besides: the task, the model."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """More columns of the table: their heading, and the curve whose median they show."""

    def reach_end(self, devices: list[str], console: Console) -> bool:
        """Run what is incomplete, holding the folder's lock; then write `results.json` and a picture, print the table.

        Args:
            devices: as of `run_all`.

        Returns:
            False if a signal stopped it. One that comes behind the last run stops nothing.

        Raises:
            UserError: no run has a result, a run has read other inputs than were planned, or another job holds the
                folder.
        """
        with locked(self.folder), recording_failure(self.folder), StopRequest() as stop:
            console.on_lost_reader(stop.lose_reader)
            set_status(self.folder, "running", self._num_complete())
            known = [run.lost_model() for run in self.runs]
            if run_all(self.runs, devices, stop, console):
                set_status(self.folder, "requeue", self._num_complete())
                console.say(
                    f"stopped with {self._num_complete()} of {len(self.runs)} runs complete; the same command continues"
                )
                return False
            if fault := fault_in_runs(self.runs):
                set_status(self.folder, "failed", self._num_complete())
                raise UserError(fault)
            for run, before in zip(self.runs, known, strict=True):
                if (lost := run.lost_model()) and lost != before:  # which `run_all` has said
                    console.warn(f"{lost.what}; {lost.advice}")
            summary = self.summarize()
            publish_json(self.folder / runs.RESULTS, summary, ensure_ascii=False)
            if not summary["n"]:
                set_status(self.folder, "failed", 0)
                log = self.runs[0].log
                raise UserError(f"{self.folder}: none of the {len(self.runs)} runs has a result; {log} says why")
            self.draw(summary)
            set_status(self.folder, "complete", self._num_complete())
        self.show(summary, console)
        return True

    def _num_complete(self) -> int:
        return sum(run.results() is not None for run in self.runs)

    def summarize(self) -> Fields:
        """The results of all runs together.

        `settings`: one entry for each, best median first, with the statistics of each value over its runs. `failed`:
        runs without a result, and those that are no better than always predicting the most frequent answer (Mosbach et
        al. 2021, arXiv 2006.04884, section 4). `best`: the settings with the best median, and the best single run.
        """
        results = {run.name: results for run in self.runs if (results := run.results()) is not None}
        metric = next((reached.metric for reached in results.values()), "")
        sign = 1 if lower_is_better(metric.partition("/")[2]) else -1
        entries: list[Fields] = []
        for settings in dict.fromkeys(tuple(run.settings.items()) for run in self.runs):
            chosen = [run for run in self.runs if tuple(run.settings.items()) == settings]
            reached = {run.name: results[run.name] for run in chosen if run.name in results}
            entries.append(
                {
                    "settings": dict(settings),
                    "runs": [run.name for run in chosen],
                    "metrics": _statistics(reached),
                    "failed": {run.name: why for run in chosen if (why := _failure(run, reached.get(run.name)))},
                }
            )
        entries.sort(key=lambda entry: (metric not in entry["metrics"], sign * _median(entry, metric)))
        values = {run: value for entry in entries for run, value in _of(entry, metric)["values"].items()}
        best: Fields | None = None
        if values:
            name = min(values, key=lambda run: sign * values[run])
            median = {"value": _median(entries[0], metric), "settings": entries[0]["settings"]}
            best = {"median": median, "run": {"value": values[name], "name": name}}
        return {**self.facts, "metric": metric, "n": len(values), "best": best, "settings": entries}

    def show(self, summary: Fields, console: Console) -> None:
        """Print the table of the settings, the failed runs and the best one."""
        rows: list[tuple[str, ...]] = []
        for entry in summary["settings"]:
            reached = _of(entry, summary["metric"])
            spread = f"{shown(reached['mean'])} ± {shown(reached['deviation'])}"
            others = [f"{_median(entry, curve):,.0f}" for curve in self.columns.values()]
            rows.append(
                (
                    named(entry["settings"]),
                    *((shown(reached["median"]), spread) if reached["n"] else ("-", "-")),
                    str(reached["n"]),
                    *(others if reached["n"] else ["-"] * len(others)),
                    str(len(entry["failed"])),
                )
            )
        headings = ("settings", "median", "mean ± deviation", "n", *self.columns, "failed")
        console.table(f"{summary['metric']} {self.measured}", headings, rows)
        for entry in summary["settings"]:
            for run, why in entry["failed"].items():
                console.warn(f"{run} failed: {why}")
        median, run = summary["best"]["median"], summary["best"]["run"]
        console.say(
            f"best median: {named(median['settings'])}, {shown(median['value'])}; "
            f"best run: {run['name']}, {shown(run['value'])}"
        )
        console.say(
            f"{self.folder / runs.RESULTS}, {self.folder / PICTURE}; all curves: tensorboard --logdir {self.folder}"
        )

    def draw(self, summary: Fields) -> None:
        """Draw the compared metric over the steps, and what the runs reach, by setting."""
        by_name, metric = {run.name: run for run in self.runs}, summary["metric"]
        drawn = [
            DrawnSetting(entry["settings"], [by_name[name] for name in entry["runs"]], entry["metrics"].get(metric))
            for entry in summary["settings"]
        ]
        draw_sweep(self.folder / PICTURE, metric, self.measured, summary["best"]["median"]["value"], drawn)


_NONE: Fields = {"median": 0.0, "mean": None, "deviation": None, "n": 0, "values": {}}  # of a setting without results


def _of(entry: Fields, curve: str) -> Fields:
    return entry["metrics"].get(curve, _NONE)


def _median(entry: Fields, curve: str) -> float:
    return _of(entry, curve)["median"]


def _statistics(reached: dict[str, Results]) -> Fields:
    """The statistics of each curve's values over the runs of a setting, by their names."""
    curves = dict.fromkeys(curve for results in reached.values() for curve in results.values)
    return {
        curve: statistics_of(
            {run: results.values[curve] for run, results in reached.items() if curve in results.values}
        )
        for curve in curves
    }


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


def _failure(run: Run, results: Results | None) -> str | None:
    """Why a run counts as failed."""
    if results is None:
        return f"no result: {last_line(run.log)}"
    if results.value is None:
        return f"its {results.metric} is not a number"
    return no_better(results.metric, results.value, results.majority)
