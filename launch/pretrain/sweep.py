"""`cloze sweep`: a pretraining run for each combination of some settings; results as a table and a picture."""

from __future__ import annotations

import math
import os
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from cloze.launch.config import PretrainConfig, SweepConfig
from cloze.launch.config.metrics import measure_of
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.parsing import parse
from cloze.launch.pretrain.inputs import open_inputs
from cloze.launch.run import runs
from cloze.launch.run.preemption import EXIT_REQUEUE
from cloze.launch.run.sweep_pictures import DrawnSetting, draw_sweep
from cloze.launch.run.sweeps import (
    RESULTS,
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
from cloze.launch.system.console import Console
from cloze.launch.system.environment import Environment, visible_gpus
from cloze.launch.system.pictures import check_library
from cloze.launch.training.process import EXIT_COMPLETE
from cloze.launch.training.shortening import shorten
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text
from cloze.pipeline.stores.places import is_url

PICTURE = "curves.png"
# Fields that a grid may not set: they differ between runs anyway, or would make results incomparable.
_NO_SETTINGS = ("output", "grid", "run", "processes", "evaluation.metric")


@dataclass(frozen=True)
class PretrainingRun(Run):
    """One run of a pretraining sweep; its seed is a setting like others."""

    metric: str = "validation/loss"
    """The curve whose last value is compared; of data without held-out samples train/loss."""

    def results(self) -> Fields | None:
        """Last evaluation and speed of a complete run, or None."""
        if runs.read_status(self.folder).get("state") != "complete":
            return None
        (_, _, name), lines = self.metric.partition("/"), runs.read_metrics(self.folder)
        values = [line[self.metric] for line in lines if self.metric in line]
        speeds = [line["speed/tokens_per_second"] for line in lines if "speed/tokens_per_second" in line]
        return (
            {"metric": name, "validation": {name: values[-1]}, "tokens_per_second": statistics.median(speeds)}
            if values and values[-1] is not None
            else None
        )


def sweep(config: SweepConfig, environment: Environment) -> int:
    """Train every combination of the grid, each in its own process; or the one with the number `run`, in this process.

    One run at a time on each visible GPU; one after another on a CPU or with several processes per run. Complete runs
    are not repeated; interrupted ones are resumed.

    Returns:
        The exit status.

    Raises:
        UserError: a setting is wrong, or the folder holds the runs of another sweep.
    """
    if environment.world_size > 1:
        raise UserError(
            f"sweep: found it in a run of {environment.world_size} processes, expected one process, which "
            "starts the runs; leave torchrun out, and give each run its --processes"
        )
    if is_url(config.output):
        raise UserError(f"output: found {config.output}, expected a folder: the runs of a sweep lie on one file system")
    check_library("grid")
    planned, folder, console = plan(config), Path(config.output), Console()
    if config.run is not None:
        if not 0 <= config.run < len(planned):
            raise UserError(f"run: found {config.run}, expected 0 to {len(planned) - 1}, a run of the grid")
        command = planned[config.run].command
        console.say(f"run {config.run} of {len(planned)}: {planned[config.run].name}")
        sys.stdout.flush()
        os.execv(command[0], command)  # it handles signals and returns its own exit status
    devices = visible_gpus() if config.processes == 1 else []
    summary = reach_end(
        folder,
        planned,
        devices or [""],
        console,
        lambda: summarize(config, planned),
        lambda summary: draw(summary, planned, folder / PICTURE),
    )
    if summary is None:
        return EXIT_REQUEUE
    show(summary, console)
    console.say(f"{folder / RESULTS}, {folder / PICTURE}; all curves: tensorboard --logdir {folder}")
    return EXIT_COMPLETE


def plan(config: SweepConfig) -> list[PretrainingRun]:
    """All runs; the configuration of each is written beside its folder after all were checked."""
    folder = Path(config.output)
    base = {name: value for name, value in asdict(config).items() if name not in ("grid", "run")}
    planned: list[PretrainingRun] = []
    written: dict[Path, str] = {}
    for settings in combinations(config.grid, _NO_SETTINGS):
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        output = folder / part_of_name(settings)
        chosen = replace(
            parse("pretrain", PretrainConfig, ["--config", yaml.safe_dump(base), *words], complete=shorten),
            output=str(output),
        )
        deepspeed_config(chosen, 1)
        resolved = open_inputs(chosen, 1)
        runs.check_folder(resolved.config, resolved.facts)
        path = file_of(output)
        if path in written:
            raise UserError(
                f"grid: found two settings whose runs would both be {output}, expected names that differ; "
                "let one of them be a sweep of its own"
            )
        written[path] = yaml.safe_dump(asdict(chosen), sort_keys=False)
        measured = all(manifest.splits["validation"].counts.get("samples") for manifest in resolved.data.manifests)
        metric = f"validation/{config.evaluation.metric}" if measured else "train/loss"
        command = [sys.executable, "-m", "cloze", "pretrain", "--config", str(path)]
        planned.append(PretrainingRun(output.name, output, settings, command, metric))
    for path, text in written.items():
        publish_text(path, text)
    return planned


def _settings(run: Run) -> dict[str, str]:
    """The settings that distinguish lines of the table: all except the seed, since a line covers several seeds."""
    return {name: value for name, value in run.settings.items() if name != "seed"}


def summarize(config: SweepConfig, planned: list[PretrainingRun]) -> Fields:
    """The results of all runs together.

    `settings`: one entry each, best median first, with the statistics over its seeds and the median speed; `failed`:
    runs without a result, with the reason; `best`: the settings with the best median.
    """
    finished = {run.name: results for run in planned if (results := run.results()) is not None}
    described: list[Fields] = []
    for settings in [dict(each) for each in dict.fromkeys(tuple(_settings(run).items()) for run in planned)]:
        chosen = [run for run in planned if _settings(run) == settings]
        values = {
            run.name: finished[run.name]["validation"][finished[run.name]["metric"]]
            for run in chosen
            if run.name in finished
        }
        speeds = [finished[name]["tokens_per_second"] for name in values]
        described.append(
            {
                "settings": settings,
                "runs": [run.name for run in chosen],
                "measured": statistics_of(values) if values else None,
                "tokens_per_second": statistics.median(speeds) if speeds else None,
                "failed": {run.name: _why(run) for run in chosen if run.name not in finished},
            }
        )
    medians = [(each["measured"]["median"], each["settings"]) for each in described if each["measured"]]
    best = best_of(medians, config.evaluation, "settings")
    sign = 1 if measure_of(config.evaluation.metric).lower_is_better else -1
    described.sort(key=lambda each: sign * each["measured"]["median"] if each["measured"] else math.inf)
    return {"metric": planned[0].metric, "n": len(finished), "best": best, "settings": described}


def _why(run: PretrainingRun) -> str:
    """Why a run has no result."""
    if runs.read_status(run.folder).get("state") == "complete":
        return f"its last {run.metric} is not a number"
    return last_line(run.log)


def show(summary: Fields, console: Console) -> None:
    """Print the table of the settings, best first, and the failed runs."""
    rows: list[tuple[str, ...]] = []
    for each in summary["settings"]:
        found = each["measured"]
        rows.append(
            (
                named(each["settings"]),
                *(
                    (
                        shown(found["median"]),
                        f"{shown(found['mean'])} ± {shown(found['deviation'])}",
                        str(found["n"]),
                        f"{each['tokens_per_second']:,.0f}",
                    )
                    if found
                    else ("-", "-", "0", "-")
                ),
                str(len(each["failed"])),
            )
        )
    console.table(
        f"{summary['metric']} at the end", ("settings", "median", "mean ± deviation", "n", "tokens/s", "failed"), rows
    )
    for each in summary["settings"]:
        for run, why in each["failed"].items():
            console.warn(f"{run} failed: {why}")
    console.say(f"best: {named(summary['best']['settings'])}, {shown(summary['best']['value'])}")


def draw(summary: Fields, planned: list[PretrainingRun], path: Path) -> None:
    """Draw the metric over the steps and its last values, by setting."""
    by_name = {run.name: run for run in planned}
    drawn = [
        DrawnSetting(each["settings"], [by_name[name] for name in each["runs"]], each["measured"])
        for each in summary["settings"]
    ]
    draw_sweep(path, summary["metric"], "at the end", summary["best"]["value"], drawn)
