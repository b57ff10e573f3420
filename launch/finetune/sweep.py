"""Several seeds and a grid of settings: each a run of its own; medians, spreads, failures and the best of them, as a
table and as a picture.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from cloze.launch.config import EvaluationConfig, FinetuneConfig, TrainConfig
from cloze.launch.parsing import parse
from cloze.launch.run import runs
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system.console import Console, figure
from cloze.launch.system.environment import child_variables, visible_gpus
from cloze.launch.training.running import EXIT_COMPLETE, EXIT_REQUEUE
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.storage import publish_text

RESULTS = "results.json"  # of a run, and of all runs together in the folder that holds them
PICTURE = "spread.png"
_POLL_SECONDS = 0.2
# What one run does not share with the others, or what would make their values another thing.
_NO_SETTINGS = ("task", "output", "seed", "seeds", "grid", "evaluation.metric")


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
        """What it printed."""
        return self.folder.with_name(self.folder.name + ".log")

    def results(self) -> dict | None:
        """results.json of a complete run, or None."""
        try:
            complete = json.loads((self.folder / runs.STATUS).read_text(encoding="utf-8"))["state"] == "complete"
            return json.loads((self.folder / RESULTS).read_text(encoding="utf-8")) if complete else None
        except FileNotFoundError:
            return None


def combinations(grid: list[str]) -> list[dict[str, str]]:
    """Settings of the runs: every combination of the values of `FIELD=a,b,c`. Raises UserError.

    >>> combinations(["learning_rate=1e-5,2e-5", "epochs=3"])
    [{'train.learning_rate': '1e-5', 'epochs': '3'}, {'train.learning_rate': '2e-5', 'epochs': '3'}]
    """
    axes: dict[str, list[tuple[str, str]]] = {}
    for entry in grid:
        name, _, text = entry.partition("=")
        values = text.split(",")
        if not name or not all(values) or len(set(values)) < len(values):
            raise UserError(f"grid: found {entry!r}, expected FIELD=VALUE,VALUE with values that differ, such as "
                            "learning_rate=2e-5,3e-5")
        if name in {each.name for each in fields(TrainConfig)}:
            name = f"train.{name}"
        if name in _NO_SETTINGS or name in axes:
            why = "it is named twice" if name in axes else "it is the same for all runs, or their number"
            raise UserError(f"grid: found {name!r}, expected another field: {why}")
        axes[name] = [(name, value) for value in values]
    return [dict(chosen) for chosen in itertools.product(*axes.values())]


def sweep(config: FinetuneConfig, read_job: Callable[[FinetuneConfig], Any]) -> int:
    """Run every combination with every seed, each in a process of its own; returns the exit status.

    On every GPU that is visible runs one at a time; on a CPU one after another. A run that is complete is not
    repeated; one that was cut short goes on.

    Args:
        read_job: reads all that a run reads, and raises what is wrong with it (finetune/command.py).

    Raises:
        UserError: a setting or a file is wrong, or the folder holds the runs of another sweep.
    """
    _check_pictures()
    console, folder = Console(), Path(config.output)
    planned = _plan(config, read_job)
    with runs.locked(folder):
        runs.set_status(folder, "running", _complete(planned))
        stopped = run_all(planned, visible_gpus() or [""], console)
        if stopped:
            runs.set_status(folder, "requeue", _complete(planned))
            console.say(f"stopped with {_complete(planned)} of {len(planned)} runs complete; the same command goes on")
            return EXIT_REQUEUE
        summary = summarize(config, planned)
        publish_text(folder / RESULTS, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        if not summary["n"]:
            runs.set_status(folder, "failed", 0)
            raise UserError(f"{folder}: none of the {len(planned)} runs has a result; {planned[0].log} says why")
        draw(summary, folder / PICTURE)
        runs.set_status(folder, "complete", _complete(planned))
    show(summary, console)
    return EXIT_COMPLETE


def _complete(planned: list[Run]) -> int:
    return sum(run.results() is not None for run in planned)


def _plan(config: FinetuneConfig, read_job: Callable[[FinetuneConfig], Any]) -> list[Run]:
    """All runs, each with its configuration written beside its folder, once everything that they read is read."""
    folder, base = Path(config.output), asdict(replace(config, seeds=1, grid=[]))
    planned, written, settled = [], {}, []
    steps: dict[str, int | None] = {}  # of each model the checkpoint, which may be the newest one only for now
    for settings in combinations(config.grid):
        part = ",".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in settings.items())
        part = re.sub(r"[^\w.=,+-]", "_", part)
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        words = [config.task, "--config", yaml.safe_dump(base), *words]
        chosen = parse("finetune", FinetuneConfig, words, words="task")
        settled.append((settings, part, chosen))
        if chosen.model_step is None:
            steps.update(_begun_from(_file(folder / _name(part, config.seed)), chosen.model))
    for settings, part, chosen in settled:
        newest = chosen.model_step is None
        job = read_job(replace(chosen, model_step=steps.get(chosen.model)) if newest else chosen)
        step = job.source.step
        if newest:
            steps[chosen.model] = step
        for seed in range(config.seed, config.seed + config.seeds):
            name = _name(part, seed)
            output = folder / name
            if output in {run.folder for run in planned}:
                raise UserError(f"grid: found two settings whose runs would both be {output}, expected names that "
                                "differ; let one of them be a sweep of its own")
            own = {"seed": seed, "output": str(output), "model_step": step}
            runs.check_folder(replace(job.config, **own), job.facts)
            path = _file(output)
            written[path] = yaml.safe_dump(asdict(replace(chosen, **own)), sort_keys=False)
            command = [sys.executable, "-m", "cloze", "finetune", config.task, "--config", str(path)]
            planned.append(Run(name, output, settings, command))
    for path, text in written.items():
        publish_text(path, text)
    return planned


def _name(settings: str, seed: int) -> str:
    return f"{settings}/seed-{seed}" if settings else f"seed-{seed}"


def _file(output: Path) -> Path:
    """A run's configuration, beside its folder."""
    return output.with_name(output.name + ".yaml")


def _begun_from(path: Path, model: str) -> dict[str, int]:
    """The checkpoint of a model from which a run of a sweep that was stopped began: by now there may be a newer one."""
    begun = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {model: begun["model_step"]} if begun.get("model") == model and begun.get("model_step") is not None else {}


def run_all(planned: list[Run], devices: list[str], console: Console) -> bool:
    """Run what is not complete, one process at a time on each device; returns whether it was asked to stop.

    Args:
        devices: what CUDA_VISIBLE_DEVICES names; an empty name: no device is chosen.

    A signal to stop is passed on: the runs leave a checkpoint each. A run that an earlier sweep, killed itself, has
    left behind at work is waited for.
    """
    waiting = [run for run in planned if run.results() is None]
    if done := len(planned) - len(waiting):
        console.say(f"{done} of {len(planned)} runs are complete already")
    running: dict[str, tuple[Run, subprocess.Popen]] = {}
    told: list[str] = []
    passed_on = False
    with StopRequest() as stop:
        while running or (waiting and not stop.wanted):
            left_behind = [run.name for run in waiting if runs.in_use(run.folder)]
            if left_behind not in ([], told):
                console.say(f"waiting for {', '.join(left_behind)}, still at work since an earlier start")
                told = left_behind
            for device in devices:
                if device not in running and waiting and not left_behind and not stop.wanted:
                    run = waiting.pop(0)
                    running[device] = run, _start(run, device)
            time.sleep(_POLL_SECONDS)
            if stop.wanted and not passed_on:
                passed_on = True  # once: a second signal would end them without a checkpoint
                for _, process in running.values():
                    process.terminate()
            for device, (run, process) in list(running.items()):
                if process.poll() is not None:
                    del running[device]
                    _say_end(run, process.returncode, passed_on, console)
            waiting = [run for run in waiting if run.results() is None]
        return stop.wanted and any(run.results() is None for run in planned)


def _start(run: Run, device: str) -> subprocess.Popen:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    variables = child_variables(**({"CUDA_VISIBLE_DEVICES": device} if device else {}))
    with open(run.log, "a", encoding="utf-8") as log:
        return subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def _say_end(run: Run, status: int, stopped: bool, console: Console) -> None:
    results = run.results()
    if results is not None:
        console.say(f"{run.name}: {results['metric']} {_shown(results['validation'][results['metric']])}")
    elif stopped:
        console.say(f"{run.name}: stopped")
    else:
        console.warn(f"{run.name}: failed with status {status}: {last_line(run.log)}")


def last_line(log: Path) -> str:
    """The last thing that a run printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def summarize(config: FinetuneConfig, planned: list[Run]) -> dict:
    """What all runs make together.

    `settings`: one entry for each, with the statistics of each metric of each file over its seeds. `failed`: runs
    without a result, and those that are no better than always answering what is most frequent (Mosbach et al. 2021,
    arXiv 2006.04884, section 4). `best`: the settings with the best median, and the best single run.
    """
    finished = {run.name: results for run in planned if (results := run.results()) is not None}
    metric = next((results["metric"] for results in finished.values()), None)
    evaluation = replace(config.evaluation, metric=metric or "")
    described = []
    for settings in combinations(config.grid):
        chosen = [run for run in planned if run.settings == settings]
        made = {run.name: finished[run.name] for run in chosen if run.name in finished}
        described.append({
            "settings": settings, "runs": [run.name for run in chosen], "n": len(made),
            "failed": {run.name: why for run in chosen if (why := _failure(run, finished.get(run.name), evaluation))},
            "metrics": {name: _statistics(values) for name, values in _values(made).items()},
        })
    key = f"validation/{metric}"
    medians = [(each["metrics"][key]["median"], each["settings"]) for each in described if key in each["metrics"]]
    single = [(value, name) for each in described for name, value in each["metrics"].get(key, {"values": {}})
              ["values"].items()]
    return {"task": config.task, "model": config.model, "metric": metric, "n": len(finished),
            "best": {"median": _best(medians, evaluation, "settings"), "run": _best(single, evaluation, "name")},
            "settings": described}


def _failure(run: Run, results: dict | None, evaluation: EvaluationConfig) -> str | None:
    if results is None:
        return f"no result: {last_line(run.log)}"
    value, trivial = results["validation"][results["metric"]], results["majority"].get(results["metric"])
    if value is None:
        return f"{results['metric']} is not defined for what it predicts"
    if trivial is not None and not evaluation.is_better(value, trivial):
        return (f"{results['metric']} {figure(value)}, no better than {figure(trivial)}, always answering what is most "
                "frequent")
    return None


def _values(made: dict[str, dict]) -> dict[str, dict[str, float]]:
    """`FILE/METRIC` -> run -> value; values that are not defined are left out."""
    values: dict[str, dict[str, float]] = {}
    for run, results in made.items():
        for split, measured in results.items():
            if split == "validation" or split.startswith("test/"):
                for name, value in measured.items():
                    if value is not None and name != "examples" and not name.endswith("total"):
                        values.setdefault(f"{split}/{name}", {})[run] = value
    return values


def _statistics(values: dict[str, float]) -> dict:
    numbers = list(values.values())
    return {"median": statistics.median(numbers), "mean": statistics.fmean(numbers),
            "deviation": statistics.stdev(numbers) if len(numbers) > 1 else None,  # of a sample: n - 1
            "n": len(numbers), "values": values}


def _best(found: list[tuple], evaluation: EvaluationConfig, label: str) -> dict | None:
    """Of pairs (value, name) the best, the first of equal ones."""
    best = None
    for value, name in found:
        if best is None or evaluation.is_better(value, best["value"]):
            best = {"value": value, label: name}
    return best


def show(summary: dict, console: Console) -> None:
    """The table of the settings, and where the best run lies."""
    rows = []
    for each in summary["settings"]:
        measured = each["metrics"].get(f"validation/{summary['metric']}")
        spread = (_shown(measured["median"]), f"{_shown(measured['mean'])} ± {_shown(measured['deviation'])}"
                  ) if measured else ("-", "-")
        rows.append((_named(each["settings"]), *spread, str(each["n"]), str(len(each["failed"]))))
    console.table(f"{summary['task']}: validation {summary['metric']}",
                  ("settings", "median", "mean ± deviation", "n", "failed"), rows)
    for each in summary["settings"]:
        for run, why in each["failed"].items():
            console.warn(f"{run} failed: {why}")
    if best := summary["best"]["run"]:
        console.say(f"best median: {_named(summary['best']['median']['settings'])}; best run: {best['name']}, "
                    f"{_shown(best['value'])}")


def _named(settings: dict[str, str]) -> str:
    return ", ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in settings.items()) or "as configured"


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else figure(value)


def _check_pictures() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("seeds: found no matplotlib, expected it for the picture of the spread; "
                        f"{how_to_install('pictures')}") from None


def draw(summary: dict, path: Path) -> None:
    """A point a run, a column a setting, a line at each median."""
    from matplotlib.figure import Figure

    shown = summary["settings"]
    figure = Figure(figsize=(max(4.0, 1.6 * len(shown)), 4.0), layout="constrained")
    axes = figure.subplots()
    for column, each in enumerate(shown):
        if measured := each["metrics"].get(f"validation/{summary['metric']}"):
            axes.plot([column] * measured["n"], list(measured["values"].values()), "o", alpha=0.6, color="tab:blue")
            axes.hlines(measured["median"], column - 0.25, column + 0.25, color="tab:orange")
    axes.set_xticks(range(len(shown)), [_named(each["settings"]).replace(", ", "\n") for each in shown])
    axes.set_ylabel(f"validation {summary['metric']}")
    axes.set_title(f"{summary['task']}: each run, and the median")
    figure.savefig(path, dpi=120)
