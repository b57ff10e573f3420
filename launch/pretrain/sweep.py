"""`cloze sweep`: a pretraining run for each combination of some settings; results as a table and a picture."""

import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cloze.launch.checkpoint.state import damage_by_sizes
from cloze.launch.config import PretrainConfig, SweepConfig
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.parsing import parse
from cloze.launch.pretrain.inputs import open_inputs
from cloze.launch.pretrain.precheck import check_inputs
from cloze.launch.pretrain.shapes import complete
from cloze.launch.run.integrity import own_tokenizer
from cloze.launch.run.metrics_file import is_evaluation, iterate_metrics
from cloze.launch.run.resume_check import check_folder
from cloze.launch.run.runs import CHECKPOINTS, FIRST_WEIGHTS, METRICS, SOFTWARE, TOKENIZER
from cloze.launch.run.status_file import read_status
from cloze.launch.sweeps.planning import arguments_of, combinations, command_of, part_of_name, with_configurations
from cloze.launch.sweeps.results import Sweep
from cloze.launch.sweeps.run import Lost, Results, Run, claim
from cloze.launch.system.console import Console
from cloze.launch.system.environment.gpus import visible_gpus
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.exit_status import EXIT_COMPLETE, EXIT_REQUEUE
from cloze.launch.system.pictures import check_library
from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.untrusted import dump_yaml, fields_if_readable

_SPEED = "speed/tokens_per_second"
# Fields that a grid may not set: they differ between runs anyway, or would make results incomparable.
_NO_SETTINGS = ("output", "grid", "run", "processes", "evaluation.metric")
# Fields by which runs are measured on other samples, or by another loss.
_MEASURES = (
    "data",
    "objective",
    "objective_options",
    "evaluation.samples",
    "evaluation.masking_rate",
    "evaluation.sets",
)


@dataclass(frozen=True)
class PretrainingRun(Run):
    """One run of a pretraining sweep; its seed is a setting like others."""

    metric: str = "validation/loss"
    """The curve whose last value is compared; of a run without held-out samples train/loss."""

    def results(self) -> Results | None:
        """The evaluation at the end and the median speed of a complete run; None for another. A value that was not
        finite is left out, and so is one whose line in metrics.jsonl is lost: an earlier one is not that of the end.
        """
        if not self.complete:
            return None
        line, speeds = self._curve()
        value = line.get(self.metric) if line else None
        values = {} if value is None else {self.metric: value}
        if values and speeds:
            values[_SPEED] = statistics.median(speeds)
        return Results(self.metric, values)

    def lost_model(self) -> Lost | None:
        """As for every run: of its last checkpoint and its tokenizer. The run goes on from another checkpoint if there
        is one; without any it is not begun anew unasked.
        """
        if not self.complete:
            return None
        end, found = self._end, damage_by_sizes(self.folder)
        if problem := found.get(end, "it is missing"):
            folder = self.folder / CHECKPOINTS
            expected = f"(of step {end}: {problem}), expected the last one as it was saved"
            if None in found.values():
                return Lost(f"{folder}: found only older checkpoints whole {expected}")
            what = f"{folder}: found no whole checkpoint {expected}: no weights of the run are left, its curve counts"
            return Lost(what, self.repeating)
        try:
            own_tokenizer(self.folder)
        except UserError as error:
            what, _, advice = str(error).partition("; ")
            return Lost(what, advice if (self.folder / TOKENIZER).exists() else None)
        return None

    def lost_curve(self) -> Lost | None:
        """As for every run; also the line with the value that is compared."""
        lost = super().lost_curve()
        if lost is None and self.complete and self._curve()[0] is None:
            found = f"{self.folder / METRICS}: found no {self.metric} of step {self._end}, the last one"
            return Lost(f"{found}, expected it as the run has written it", self.repeating)
        return lost

    @property
    def _end(self) -> int:
        """Step of the last checkpoint of a complete run."""
        return int(read_status(self.folder).get("step", 0))

    def _curve(self) -> tuple[Fields | None, list[float]]:
        """The line of a complete run's metrics.jsonl at the end, None if it is lost, and the speeds."""
        last: Fields | None = None
        speeds: list[float] = []
        end, evaluation = self._end, is_evaluation({self.metric: None})
        for line in iterate_metrics(self.folder) if (self.folder / METRICS).exists() else ():
            if line["step"] >= end and is_evaluation(line) == evaluation:  # later if the last steps were skipped
                last = line
            speeds += [line[_SPEED]] if line.get(_SPEED) is not None else []
        return last, speeds


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
    planned, console = plan(config), Console()
    names = [entry.partition("=")[0] for entry in config.grid]
    if others := [name for name in names if f"{name}.".startswith(tuple(f"{each}." for each in _MEASURES))]:
        console.warn(
            f"grid: found {', '.join(others)}, by which runs are measured on other samples or by another loss: their "
            "order says little; evaluate them on one text (cloze evaluate)"
        )
    if config.run is not None:
        if not 0 <= config.run < len(planned):
            raise UserError(f"run: found {config.run}, expected 0 to {len(planned) - 1}, a run of the grid")
        command = planned[config.run].command
        planned[config.run].check()
        if (log := claim(planned[config.run])) is None:
            raise UserError(
                f"run: found {planned[config.run].folder} in use by another job, expected it free; wait for that job "
                "or choose another --output"
            )
        os.set_inheritable(log.fileno(), True)  # the lock lasts as long as the run's process
        console.say(f"run {config.run} of {len(planned)}: {planned[config.run].name}")
        sys.stdout.flush()
        os.execv(command[0], command)  # it handles signals and returns its own exit status
    devices = visible_gpus() if config.processes == 1 else []
    done = Sweep(Path(config.output), planned, "at the end", columns={"tokens/s": _SPEED})
    if not done.reach_end(devices or [""], console):
        return EXIT_REQUEUE
    warn_of_other_weights(planned, console)
    return EXIT_COMPLETE


def warn_of_other_weights(planned: list[PretrainingRun], console: Console) -> None:
    """Warn of runs that began with other weights than others with the same settings: what `init_from` names was
    replaced between them.
    """
    found: dict[tuple[str | None, ...], set[str]] = {}
    for run in planned:
        source = tuple(run.settings.get(name) for name in ("init_from", "init_word_vectors"))
        first = fields_if_readable(run.folder / SOFTWARE).get(FIRST_WEIGHTS)
        if isinstance(first, str):  # an earlier version wrote none
            found.setdefault(source, set()).add(first)
    if any(len(weights) > 1 for weights in found.values()):
        console.warn(
            "init_from: found runs of this sweep that began with other weights than the rest, since it was replaced "
            "meanwhile: they do not compare; give another --output to make all of them anew"
        )


def plan(config: SweepConfig) -> list[PretrainingRun]:
    """All runs, after all were checked."""
    return with_configurations(Path(config.output), _planned(config))


def _planned(config: SweepConfig) -> Iterator[tuple[PretrainingRun, PretrainConfig]]:
    base = {name: value for name, value in asdict(config).items() if name not in ("grid", "run")}
    for settings in combinations(config.grid, _NO_SETTINGS):
        output = Path(config.output) / part_of_name(settings)
        chosen = replace(_read(settings, base, config.model), output=str(output))
        check_inputs(chosen)
        deepspeed_config(chosen, 1)
        resolved = open_inputs(chosen, 1)
        check_folder(resolved.config, resolved.facts)
        metric = f"validation/{resolved.config.evaluation.metric}" if resolved.held_out else "train/loss"
        settings.pop("seed", None)  # a line of the table covers several seeds
        command = command_of(["pretrain"], output)
        facts, own = resolved.facts, resolved.config
        yield PretrainingRun(output.name, output, settings, command, facts, config=own, metric=metric), chosen


def _read(settings: dict[str, str], base: Fields, model: BertConfig) -> PretrainConfig:
    """The configuration of a run. With `init_from` among its settings it has the shape of its source, as a run of
    `cloze pretrain` without --model, with the fields of `model` that differ from those of no model.

    Args:
        base: the fields of all runs.
        model: of the sweep.

    Raises:
        UserError, ModelError: a setting is wrong, or the source is none.
    """
    words = arguments_of(settings)
    if "init_from" in settings:
        base = {name: value for name, value in base.items() if name != "model"}
        given = {name: value for name, value in asdict(model).items() if value != getattr(BertConfig(), name)}
        words += [word for name, value in given.items() for word in (f"--model.{name}", json.dumps(value))]
    words = ["--config", dump_yaml(base), *words]
    return parse("pretrain", PretrainConfig, words, configs="pretrain", complete=complete)
