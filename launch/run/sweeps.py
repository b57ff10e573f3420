"""Runs over a grid of settings: every combination is planned, and runs in a process of its own."""

import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import yaml

from cloze.launch.config import RunConfig, TrainConfig
from cloze.launch.config.metrics import lower_is_better
from cloze.launch.run import as_written, runs
from cloze.launch.run.metrics_file import newest_metrics
from cloze.launch.run.ownership import in_use
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.resume_check import MEASURES
from cloze.launch.run.status_file import read_status
from cloze.launch.system.console import Console, doing, figure
from cloze.launch.system.environment import child_variables
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import publish_text
from cloze.pipeline.untrusted import check_regular, fields_if_readable, is_number

TEST_HASHES = "test_hashes"  # in a run's results
_POLL_SECONDS = 0.2
_LAST_BYTES = 1 << 16  # of a log, which every start makes longer: far more than a line
_NOTHING = "it printed nothing"
_COUNTS = ("examples", "total", "HasAns_total", "NoAns_total")  # among the results of a run, the last three SQuAD's


@dataclass(frozen=True)
class Results:
    """What a complete run has reached."""

    metric: str
    """The curve by which runs are compared: validation/loss."""
    values: dict[str, float]
    """Results by curve; undefined ones are left out."""
    majority: float | None = None
    """What a constant prediction reaches; a run that is no better has failed."""

    @property
    def value(self) -> float | None:
        """The value by which runs are compared."""
        return self.values.get(self.metric)


@dataclass(frozen=True)
class Lost:
    """Something of a complete run that is not there as the run has written it."""

    what: str
    """Where, what is found, and what is expected."""
    advice: str | None = None
    """What to do; None: the run's command writes it again, so that it is run again."""


def no_better(metric: str, value: float, majority: float | None) -> str | None:
    """A sentence which says that a value, which may be NaN, is no better than a constant prediction's; None if it is
    better, or if there is no constant prediction.

    Args:
        metric: the curve of both: validation/accuracy, test/NAME/accuracy.
    """
    sign = 1 if lower_is_better(metric.rpartition("/")[2]) else -1
    if majority is None or sign * value < sign * majority:
        return None
    return (
        f"{metric} {figure(value)}, no better than {figure(majority)}, that of always giving the most frequent answer"
    )


# The fields that say when a run is complete (launch/training/completion.py).
_ENDS = "train.max_steps", "train.time_budget_hours", "evaluation.target", "evaluation.patience"
_MEASURES = "evaluation.metric", *MEASURES


@dataclass(frozen=True)
class Run:
    """One setting with one seed."""

    name: str
    """Name of its folder in the folder of the sweep."""
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    """What differs from the other runs except for the seed, as written in the grid."""
    command: list[str] = field(default_factory=list)
    facts: runs.Facts = field(default_factory=dict)
    """Of its inputs, as they were when it was planned."""
    test_hashes: Mapping[str, str] = field(default_factory=dict)
    """The same of its test files."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of its configuration as planned, in which steps are counted, by dotted names."""

    @property
    def log(self) -> Path:
        """The file with the run's output."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end."""
        return read_status(self.folder).get("state") == "complete"

    @property
    def measured(self) -> bool:
        """Whether it has results of these test files, which may be others than at an earlier start, and nothing is lost
        of its model that its command writes again.
        """
        lost = self.lost_model()
        if self.results() is None or (lost and lost.advice is None) or not self._has_this_end():
            return False
        path = self.folder / runs.RESULTS
        return (runs.read_fields(path).get(TEST_HASHES, {}) if path.is_file() else {}) == self.test_hashes

    def _has_this_end(self) -> bool:
        """Whether the run has ended where it is to end now: checkpoint.accept_changes lets it go on from another
        end.
        """
        made = self.folder / runs.CONFIG
        if as_written.is_lost(made):  # `fault_in_runs` says what to do
            return True
        fields = runs.fields_of(self.folder)
        return all(fields.get(name) == self.fields[name] for name in _ENDS if name in self.fields)

    def measured_otherwise(self) -> str | None:
        """One line if a run that has ended was measured by other settings than are planned; else None."""
        path = self.folder / runs.CONFIG
        if not self.fields or as_written.is_lost(path):
            return None
        made = runs.fields_of(self.folder)
        for name in sorted(made.keys() | self.fields.keys()):
            found, expected = made.get(name), self.fields.get(name)
            if name.startswith(_MEASURES) and found != expected:
                return (
                    f"{self.folder}: found a complete run with {name} {found}, expected {expected}: its values would "
                    "not compare with those of new runs; give it as it was, or another --output"
                )
        return None

    def lost_model(self) -> Lost | None:
        """What of its model a complete run has lost, by a look at sizes; None: nothing."""
        path = as_written.lost_of_model(self.folder) if self.complete else None
        return path if path is None else Lost(_as_written(path))

    def lost_curve(self) -> Lost | None:
        """What of its curve, which no command writes again, a complete run has lost; None: nothing that is needed."""
        path = self.folder / runs.METRICS
        if path.exists() and path.stat().st_size:
            return None
        return Lost(_as_written(path), self.repeating)

    @property
    def repeating(self) -> str:
        """What to do about a file that the run's command does not write again."""
        return f"restore it, or remove {self.folder}, and the same command runs it again"

    def results(self) -> Results | None:
        """The values of a complete fine-tuning run; None also where they are damaged, so that it is run again.

        Raises:
            UserError: they are not as a run writes them.
        """
        path = self.folder / runs.RESULTS
        if not self.complete or not (content := fields_if_readable(path)):
            return None
        try:
            values = {
                f"{split}/{name}": value
                for split, measured in content.items()
                if split == "validation" or split.startswith("test/")
                for name, value in measured.items()
                if value is not None and name not in _COUNTS
            }
            metric = content["metric"]
            majority = content["majority"].get(metric)
        except (AttributeError, KeyError, TypeError):
            values, metric, majority = {}, None, None
        if not isinstance(metric, str) or not all(map(is_number, [*values.values(), majority or 0])):
            raise UserError(
                f"{path}: found no results of a run, expected a metric and numbers; remove {self.folder}, and the same "
                "command runs it again"
            )
        return Results(f"validation/{metric}", values, majority)


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


def arguments_of(settings: dict[str, str]) -> list[str]:
    """Settings as the command line takes them."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def file_of(output: Path) -> Path:
    """The file with a run's configuration, beside its folder."""
    return output.with_name(output.name + ".yaml")


def command_of(words: Sequence[str], output: Path) -> list[str]:
    """The command of a run with its own configuration."""
    return [sys.executable, "-m", "cloze", *words, "--config", str(file_of(output))]


def written(sweep: Path, planned: Iterable[tuple[AnyRun, RunConfig]]) -> list[AnyRun]:
    """Write the configuration of each run beside its folder.

    Args:
        sweep: folder of all of them.
        planned: runs and their configurations; nothing is written before all of them have been given, and so checked.

    Raises:
        UserError: two runs have the same folder, or the same settings in other words, as 1e-3 and 0.001; or the sweep's
            folder is that of a single run, whose results and status the sweep's would replace.
    """
    if (sweep / runs.CONFIG).exists():
        raise UserError(
            f"output: found {sweep}, the folder of a single run ({runs.CONFIG}), expected a new one or that of this "
            "sweep; choose another --output"
        )
    texts: dict[Path, str] = {}
    taken: set[Path] = set()
    names: dict[str, str] = {}
    checked: list[AnyRun] = []
    for run, config in planned:
        settings = yaml.safe_dump(asdict(config) | {"output": None})
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
        texts[path] = yaml.safe_dump(asdict(config), sort_keys=False)
        checked.append(run)
    for path, text in texts.items():
        publish_text(path, text)
    return checked


def run_all(planned: Sequence[Run], devices: list[str], console: Console) -> bool:
    """Run the incomplete runs, one process at a time on each device.

    Args:
        devices: values of CUDA_VISIBLE_DEVICES; an empty one selects no device.

    Returns:
        Whether a signal stopped it.

    Raises:
        UserError: a complete run was measured otherwise than is planned.

    Stop signals are forwarded, so that each run leaves a checkpoint. A run still active from a sweep that was killed is
    waited for.
    """
    for run in planned:
        if lost := run.lost_model():
            advice = lost.advice if run.measured else "the run is started again, which writes it anew"
            console.warn(f"{lost.what}; {advice}")
    for run in planned:
        if run.measured and (other := run.measured_otherwise()):
            raise UserError(other)
    waiting = [run for run in planned if not run.measured]
    if done := len(planned) - len(waiting):
        console.say(f"{done} of {len(planned)} runs are complete already")
    running: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}
    reported: list[str] = []
    passed_on = False
    with StopRequest() as stop, doing() as tell:
        while running or (waiting and not stop.wanted):
            left_behind = [run.name for run in waiting if in_use(run.folder)]
            if left_behind not in ([], reported):
                console.say(f"waiting for {', '.join(left_behind)}, still at work since an earlier start")
                reported = left_behind
            for device in devices:
                if device not in running and waiting and not left_behind and not stop.wanted:
                    run = waiting.pop(0)
                    running[device] = run, _start(run, device)
                    console.say(f"{_which(run, planned)} begins; its output: {run.log}")
            time.sleep(_POLL_SECONDS)
            if running and console.is_main:
                tell(lambda: "; ".join(_at(run, planned) for run, _ in running.values()))
            if stop.wanted and not passed_on:
                passed_on = True  # once only: a second signal would end the runs without a checkpoint
                for _, process in running.values():
                    process.terminate()
            for device, (run, process) in list(running.items()):
                if process.poll() is not None:
                    del running[device]
                    _say_end(run, process.returncode, passed_on, console)
            waiting = [run for run in waiting if not run.measured]
        return stop.wanted and not all(run.measured for run in planned)


def fault_in_runs(planned: Sequence[Run]) -> str | None:
    """One line if a run that has ended has read other inputs than were planned, or has lost a file; else None."""
    ended = [run for run in planned if run.results() is not None]
    for run in ended:
        lost = run.lost_model()
        if lost is None or lost.advice:
            lost = run.lost_curve()
        if lost:
            advice = lost.advice or "the same command writes it again"
            return f"{lost.what}: something was removed meanwhile; {advice}"
        for path in (run.folder / runs.CONFIG, run.folder / runs.DATA):
            if as_written.is_lost(path):
                return f"{_as_written(path)}: something was removed meanwhile; {run.repeating}"
        read = runs.read_fields(run.folder / runs.DATA)
        for name, expected in run.facts.items():
            if (found := read.get(name, expected)) != expected:  # an earlier version wrote fewer
                return (
                    f"{run.folder}: found a run with {name} {found!s:.12}, expected {expected!s:.12}, as when the runs "
                    "were planned: what it reads was replaced meanwhile, so that results do not compare; put it back "
                    "and remove this folder, or give another --output"
                )
    if others := [run for run in ended if not run.measured]:
        return (
            f"{others[0].folder}: found results of other test files than when the runs were planned: one was replaced "
            "meanwhile; run the same command again, which measures them anew"
        )
    return None


def _as_written(lost: Path) -> str:
    return f"{lost}: found {as_written.found_at(lost)}, expected it as the run has written it"


def _start(run: Run, device: str) -> subprocess.Popen[bytes]:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    variables = child_variables(**({"CUDA_VISIBLE_DEVICES": device} if device else {}))
    with open(run.log, "a", encoding="utf-8") as log:
        return subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def _which(run: Run, planned: Sequence[Run]) -> str:
    return f"run {planned.index(run) + 1} of {len(planned)}, {run.name}"


def _at(run: Run, planned: Sequence[Run]) -> str:
    """A run that is at work, with its step and loss as far as it has logged any."""
    metrics = newest_metrics(run.folder)
    if metrics is None:
        return f"{_which(run, planned)}: no step logged yet"
    return f"{_which(run, planned)}: step {metrics['step']}, loss {figure(metrics['train/loss'])}"


def _say_end(run: Run, status: int, stopped: bool, console: Console) -> None:
    results = run.results()
    if results is not None:
        console.say(f"{run.name}: {results.metric} {shown(results.value)}")
    elif stopped:
        console.say(f"{run.name}: stopped")
    else:
        console.warn(f"{run.name}: failed with status {status}: {last_line(run.log)}")


def last_line(log: Path) -> str:
    """The last line of a run's output."""
    check_regular(log)
    if not log.exists():
        return _NOTHING
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read(_LAST_BYTES).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), _NOTHING)


def named(settings: dict[str, str]) -> str:
    """A setting as text for tables."""
    return ", ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in settings.items()) or "as configured"


def shown(value: float | None) -> str:
    """A value as text for tables."""
    return "-" if value is None or math.isnan(value) else figure(value)
