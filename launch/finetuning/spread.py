"""What the runs of a sweep make together: medians, spreads, failures, the best; as a table and as a picture."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from launch.config import EvaluationConfig, FinetuneConfig
from launch.console import Console
from launch.finetuning.sweep import Run, combinations, last_line
from pipeline.errors import UserError


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
        return f"{results['metric']} {value:.4f}, no better than {trivial:.4f}, always answering what is most frequent"
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
        rows.append((_name(each["settings"]), *spread, str(each["n"]), str(len(each["failed"]))))
    console.table(f"{summary['task']}: validation {summary['metric']}",
                  ("settings", "median", "mean ± deviation", "n", "failed"), rows)
    for each in summary["settings"]:
        for run, why in each["failed"].items():
            console.warn(f"{run} failed: {why}")
    if best := summary["best"]["run"]:
        console.say(f"best median: {_name(summary['best']['median']['settings'])}; best run: {best['name']}, "
                    f"{_shown(best['value'])}")


def _name(settings: dict[str, str]) -> str:
    return ", ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in settings.items()) or "as configured"


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def check_pictures() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("seeds: found no matplotlib, expected it for the picture of the spread; pip install "
                        "'cloze[pictures]'") from None


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
    axes.set_xticks(range(len(shown)), [_name(each["settings"]).replace(", ", "\n") for each in shown])
    axes.set_ylabel(f"validation {summary['metric']}")
    axes.set_title(f"{summary['task']}: each run, and the median")
    figure.savefig(path, dpi=120)
