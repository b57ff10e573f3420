"""Several seeds and a grid of settings: each a run of its own, and what they make together."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import yaml

from launch import runs
from launch.config import FinetuneConfig, TrainConfig
from launch.console import Console
from launch.environment import child_variables, visible_gpus
from launch.preemption import StopRequest
from launch.running import EXIT_COMPLETE, EXIT_REQUEUE
from pipeline.errors import UserError
from pipeline.storage import publish_text

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


def sweep(config: FinetuneConfig) -> int:
    """Run every combination with every seed, each in a process of its own; returns the exit status.

    On every GPU that is visible runs one at a time; on a CPU one after another. A run that is complete is not
    repeated; one that was cut short goes on.

    Raises:
        UserError: a setting or a file is wrong, or the folder holds the runs of another sweep.
    """
    from launch.finetuning import spread

    spread.check_pictures()
    console, folder = Console(), Path(config.output)
    planned = _plan(config)
    with runs.locked(folder):
        runs.set_status(folder, "running", _complete(planned))
        stopped = run_all(planned, visible_gpus() or [""], console)
        if stopped:
            runs.set_status(folder, "requeue", _complete(planned))
            console.say(f"stopped with {_complete(planned)} of {len(planned)} runs complete; the same command goes on")
            return EXIT_REQUEUE
        summary = spread.summarize(config, planned)
        publish_text(folder / RESULTS, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        if not summary["n"]:
            runs.set_status(folder, "failed", 0)
            raise UserError(f"{folder}: none of the {len(planned)} runs has a result; {planned[0].log} says why")
        spread.draw(summary, folder / PICTURE)
        runs.set_status(folder, "complete", _complete(planned))
    spread.show(summary, console)
    return EXIT_COMPLETE


def _complete(planned: list[Run]) -> int:
    return sum(run.results() is not None for run in planned)


def _plan(config: FinetuneConfig) -> list[Run]:
    """All runs, each with its configuration written beside its folder, once everything that they read is read."""
    from launch.cli import parse
    from launch.finetune import read_job

    folder, base = Path(config.output), asdict(replace(config, seeds=1, grid=[]))
    planned, written, settled = [], {}, []
    steps: dict[str, int | None] = {}  # of each model the checkpoint, which may be the newest one only for now
    for settings in combinations(config.grid):
        part = ",".join(f"{name.rsplit('.', 1)[-1]}={value}" for name, value in settings.items())
        part = re.sub(r"[^\w.=,+-]", "_", part)
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        chosen = parse("finetune", [config.task, "--config", yaml.safe_dump(base), *words])
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
            command = [sys.executable, "-m", "launch", "finetune", config.task, "--config", str(path)]
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
        console.say(f"{run.name}: {results['metric']} {results['validation'][results['metric']]}")
    elif stopped:
        console.say(f"{run.name}: stopped")
    else:
        console.warn(f"{run.name}: failed with status {status}: {last_line(run.log)}")


def last_line(log: Path) -> str:
    """The last thing that a run printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
