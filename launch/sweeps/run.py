"""One run of a sweep: its folder, its results, and what it has lost."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from cloze.launch.checkpoint.complete_check import check_folder_begun_again, other_end
from cloze.launch.config import RunConfig
from cloze.launch.config.metrics import lower_is_better
from cloze.launch.run import integrity, runs
from cloze.launch.run.resume_check import check_folder
from cloze.launch.run.run_locks import in_use
from cloze.launch.run.status_file import read_status
from cloze.launch.system.console import figure
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import holding, publish_text, readable_errors, take_lock
from cloze.pipeline.untrusted import check_regular, fields_if_readable, is_number

TEST_HASHES = "test_hashes"  # in a run's results
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


def file_of(output: Path) -> Path:
    """The file with a run's configuration, beside its folder."""
    return output.with_name(output.name + ".yaml")


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
    config: RunConfig | None = None
    """As planned, in which steps are counted; None: a run is not compared with it."""
    configuration: str = ""
    """What its command reads from `file_of` its folder."""

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
        if self.results() is None or (lost and lost.advice is None) or self.other_end():
            return False
        path = self.folder / runs.RESULTS
        return (runs.read_fields(path).get(TEST_HASHES, {}) if path.is_file() else {}) == self.test_hashes

    def other_end(self) -> str | None:
        """One line if the run has ended where it is not to end now; else None."""
        if self.config is None or integrity.is_lost(self.folder / runs.CONFIG):  # `fault_in_runs` says what to do
            return None
        return other_end(self.config)

    def check(self) -> None:
        """Compare what lies in the folder with the plan: another command may have made it since.

        Raises:
            UserError: it is no part of this run; or it is all of it, measured otherwise.
        """
        if self.config is None or integrity.is_lost(self.folder / runs.CONFIG):  # `fault_in_runs` says what to do
            return
        check_folder(self.config, self.facts)
        check_folder_begun_again(self.config, self.facts)

    def lost_model(self) -> Lost | None:
        """What of its model a complete run has lost, by a look at sizes; None: nothing."""
        path = integrity.lost_of_model(self.folder) if self.complete else None
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


def claim(run: Run) -> TextIO | None:
    """Take a run: hold the lock of its log, and write the configuration that its command reads.

    The command's process has to inherit the log, and holds its lock until it ends; that of the run's folder it takes
    only when it has imported what it needs, and has read the configuration.

    Returns:
        The log, to write; None if another process has the run.
    """
    with readable_errors(run.log), ExitStack() as stack:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        check_regular(run.log)  # a pipe would wait for a reader
        log = stack.enter_context(open(run.log, "a", encoding="utf-8"))
        if not take_lock(log, run.log):
            return None
        publish_text(file_of(run.folder), run.configuration)
        stack.pop_all()
        return log


def is_claimed(run: Run) -> bool:
    """Whether a process has taken the run, or holds its folder."""
    if in_use(run.folder):
        return True
    if not run.log.is_file():
        return False
    with holding(run.log) as is_held:
        return not is_held


def fault_in_runs(planned: Sequence[Run]) -> str | None:
    """One line if a run that has ended was made otherwise than was planned, or has lost a file; else None."""
    ended = [run for run in planned if run.results() is not None]
    for run in ended:
        lost = run.lost_model()
        if lost is None or lost.advice:
            lost = run.lost_curve()
        if lost:
            advice = lost.advice or "the same command writes it again"
            return f"{lost.what}: something was removed meanwhile; {advice}"
        for path in (run.folder / runs.CONFIG, run.folder / runs.DATA):
            if integrity.is_lost(path):
                return f"{_as_written(path)}: something was removed meanwhile; {run.repeating}"
        read = runs.read_fields(run.folder / runs.DATA)
        for name, expected in run.facts.items():
            if (found := read.get(name, expected)) != expected:  # an earlier version wrote fewer
                return (
                    f"{run.folder}: found a run with {name} {found!s:.12}, expected {expected!s:.12}, as when the runs "
                    "were planned: what it reads was replaced meanwhile, so that results do not compare; put it back "
                    "and remove this folder, or give another --output"
                )
        try:
            run.check()
        except UserError as error:
            return str(error)
        if other := run.other_end():
            return other
    if others := [run for run in ended if not run.measured]:
        return (
            f"{others[0].folder}: found results of other test files than when the runs were planned: one was replaced "
            "meanwhile; run the same command again, which measures them anew"
        )
    return None


def _as_written(lost: Path) -> str:
    return f"{lost}: found {integrity.found_at(lost)}, expected it as the run has written it"


def last_line(log: Path) -> str:
    """The last line of a run's output."""
    check_regular(log)
    if not log.exists():
        return _NOTHING
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read(_LAST_BYTES).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), _NOTHING)


def shown(value: float | None) -> str:
    """A value as text for tables."""
    return "-" if value is None or math.isnan(value) else figure(value)
