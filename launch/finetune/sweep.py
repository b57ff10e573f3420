"""Fine-tuning sweeps: a run for each seed and combination of settings; results as a table and a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from cloze.launch.config import EvaluationConfig, FinetuneConfig
from cloze.launch.finetune.job import Job
from cloze.launch.parsing import parse
from cloze.launch.run import runs
from cloze.launch.run.preemption import EXIT_REQUEUE
from cloze.launch.run.sweep_pictures import DrawnSetting, draw_sweep
from cloze.launch.run.sweeps import (
    Run,
    best_of,
    combinations,
    file_of,
    last_line,
    named,
    part_of_name,
    reach_end,
    shown,
    statistics_of,
)
from cloze.launch.system.console import Console, figure
from cloze.launch.system.environment import visible_gpus
from cloze.launch.system.pictures import check_library
from cloze.launch.training.process import EXIT_COMPLETE
from cloze.launch.training.shortening import shorten
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text
from cloze.pipeline.untrusted import load_yaml

PICTURE = "spread.png"
# Fields that a grid may not set: they differ between runs anyway, or would make results incomparable.
_NO_SETTINGS = ("task", "output", "seed", "seeds", "grid", "evaluation.metric")


def sweep(config: FinetuneConfig, read_job: Callable[[FinetuneConfig], Job]) -> int:
    """Run every combination with every seed, each in a process of its own.

    One run at a time on each visible GPU; one after another on a CPU. Complete runs are not repeated; interrupted ones
    are resumed.

    Args:
        read_job: reads all inputs of a run, and raises UserError for wrong ones (finetune/command.py).

    Returns:
        The exit status.

    Raises:
        UserError: a setting or a file is wrong, or the folder holds the runs of another sweep.
    """
    check_library("seeds")
    console, folder = Console(), Path(config.output)
    planned = _plan(config, read_job)
    summary = reach_end(
        folder,
        planned,
        visible_gpus() or [""],
        console,
        lambda: summarize(config, planned),
        lambda summary: draw(summary, planned, folder / PICTURE),
    )
    if summary is None:
        return EXIT_REQUEUE
    show(summary, console)
    return EXIT_COMPLETE


def _plan(config: FinetuneConfig, read_job: Callable[[FinetuneConfig], Job]) -> list[Run]:
    """All runs; the configuration of each is written beside its folder after all inputs were read."""
    folder, base = Path(config.output), asdict(replace(config, seeds=1, grid=[]))
    planned: list[Run] = []
    written, settled = {}, []
    steps: dict[str, int | None] = {}  # the checkpoint of each model: the newest one may change
    for settings in combinations(config.grid, _NO_SETTINGS):
        part = part_of_name(settings)
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        words = [config.task, "--config", yaml.safe_dump(base), *words]
        chosen = parse("finetune", FinetuneConfig, words, words="task", complete=shorten)
        settled.append((settings, part, chosen))
        if chosen.model_step is None:
            steps.update(_begun_from(file_of(folder / _name(part, config.seed)), chosen.model))
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
                raise UserError(
                    f"grid: found two settings whose runs would both be {output}, expected names that "
                    "differ; let one of them be a sweep of its own"
                )
            where = str(output)
            runs.check_folder(replace(job.config, seed=seed, output=where, model_step=step), job.facts)
            path = file_of(output)
            written[path] = yaml.safe_dump(
                asdict(replace(chosen, seed=seed, output=where, model_step=step)), sort_keys=False
            )
            command = [sys.executable, "-m", "cloze", "finetune", config.task, "--config", str(path)]
            planned.append(Run(name, output, settings, command))
    for path, text in written.items():
        publish_text(path, text)
    return planned


def _name(settings: str, seed: int) -> str:
    return f"{settings}/seed-{seed}" if settings else f"seed-{seed}"


def _begun_from(path: Path, model: str) -> dict[str, int]:
    """The checkpoint of a model from which an earlier run of this sweep began: there may be a newer one now."""
    begun: Any = load_yaml(path.read_text(encoding="utf-8"), name=str(path)) if path.is_file() else {}
    return {model: begun["model_step"]} if begun.get("model") == model and begun.get("model_step") is not None else {}


def summarize(config: FinetuneConfig, planned: list[Run]) -> Fields:
    """The results of all runs together.

    `settings`: one entry for each, with the statistics of each metric of each file over its seeds. `failed`: runs
    without a result, and those that are no better than always predicting the most frequent answer (Mosbach et al. 2021,
    arXiv 2006.04884, section 4). `best`: the settings with the best median, and the best single run.
    """
    finished = {run.name: results for run in planned if (results := run.results()) is not None}
    metric = next((results["metric"] for results in finished.values()), None)
    evaluation = replace(config.evaluation, metric=metric or "")
    described: list[Fields] = []
    for settings in combinations(config.grid, _NO_SETTINGS):
        chosen = [run for run in planned if run.settings == settings]
        made = {run.name: finished[run.name] for run in chosen if run.name in finished}
        described.append(
            {
                "settings": settings,
                "runs": [run.name for run in chosen],
                "n": len(made),
                "failed": {
                    run.name: why for run in chosen if (why := _failure(run, finished.get(run.name), evaluation))
                },
                "metrics": {name: statistics_of(values) for name, values in _values(made).items()},
            }
        )
    key = f"validation/{metric}"
    medians = [(each["metrics"][key]["median"], each["settings"]) for each in described if key in each["metrics"]]
    single = [
        (value, name)
        for each in described
        for name, value in each["metrics"].get(key, {"values": {}})["values"].items()
    ]
    return {
        "task": config.task,
        "model": config.model,
        "metric": metric,
        "n": len(finished),
        "best": {"median": best_of(medians, evaluation, "settings"), "run": best_of(single, evaluation, "name")},
        "settings": described,
    }


def _failure(run: Run, results: Fields | None, evaluation: EvaluationConfig) -> str | None:
    if results is None:
        return f"no result: {last_line(run.log)}"
    value, trivial = results["validation"][results["metric"]], results["majority"].get(results["metric"])
    if value is None:
        return f"{results['metric']} is not defined for what it predicts"
    if trivial is not None and not evaluation.is_better(value, trivial):
        return f"{results['metric']} {figure(value)}, no better than {figure(trivial)}, the majority answer"
    return None


def _values(made: dict[str, Fields]) -> dict[str, dict[str, float]]:
    """`FILE/METRIC` -> run -> value; undefined values are omitted."""
    values: dict[str, dict[str, float]] = {}
    for run, results in made.items():
        for split, measured in results.items():
            if split == "validation" or split.startswith("test/"):
                for name, value in measured.items():
                    if value is not None and name != "examples" and not name.endswith("total"):
                        values.setdefault(f"{split}/{name}", {})[run] = value
    return values


def show(summary: Fields, console: Console) -> None:
    """Print the table of the settings, failed runs and the best run."""
    rows: list[tuple[str, ...]] = []
    for each in summary["settings"]:
        measured = each["metrics"].get(f"validation/{summary['metric']}")
        spread = (
            (shown(measured["median"]), f"{shown(measured['mean'])} ± {shown(measured['deviation'])}")
            if measured
            else ("-", "-")
        )
        rows.append((named(each["settings"]), *spread, str(each["n"]), str(len(each["failed"]))))
    console.table(
        f"{summary['task']}: validation {summary['metric']}",
        ("settings", "median", "mean ± deviation", "n", "failed"),
        rows,
    )
    for each in summary["settings"]:
        for run, why in each["failed"].items():
            console.warn(f"{run} failed: {why}")
    if best := summary["best"]["run"]:
        console.say(
            f"best median: {named(summary['best']['median']['settings'])}; best run: {best['name']}, "
            f"{shown(best['value'])}"
        )


def draw(summary: Fields, planned: list[Run], path: Path) -> None:
    """Draw the metric of the validation file over the steps and at each run's best checkpoint, by setting."""
    metric, by_name = f"validation/{summary['metric']}", {run.name: run for run in planned}
    drawn = [
        DrawnSetting(each["settings"], [by_name[name] for name in each["runs"]], each["metrics"].get(metric))
        for each in summary["settings"]
    ]
    draw_sweep(path, metric, "at the best checkpoint", summary["best"]["median"]["value"], drawn)
