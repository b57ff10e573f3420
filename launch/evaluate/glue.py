"""GLUE (Wang et al. 2019, arXiv 1804.07461): fine-tuning on its tasks with several seeds."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from cloze.launch.config.finetuning import FinetuneConfig
from cloze.launch.config.training import AUTO
from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.finetune.sweep import checked_runs, configured, steps_begun
from cloze.launch.finetune.tasks import TASKS
from cloze.launch.run import integrity, runs
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.run_locks import locked
from cloze.launch.sweeps.planning import with_configurations
from cloze.launch.sweeps.pool import run_all
from cloze.launch.sweeps.results import statistics_of
from cloze.launch.sweeps.run import Run, fault_in_runs
from cloze.launch.system.console import Console
from cloze.launch.system.environment.gpus import visible_gpus
from cloze.model.huggingface import load_pretrained
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_text
from cloze.pipeline.untrusted import dump_yaml

# GLUE's tasks by their names in `cloze finetune`; folders have these names or those of GLUE's archive (SST-2 is sst2).
_NAMES = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
_DEVELOPMENT = ("dev.tsv", "dev_matched.tsv")
_RANDOM = "random-weights"  # folder of the runs from random weights
_UNDEFINED = ("matthews_correlation", "pearson", "spearman")  # of constant predictions; they count as 0


def find_tasks(folder: Path, warn: Callable[[str], None]) -> dict[str, tuple[Path, Path]]:
    """Task -> training file and development file, for every task that has a folder here; one that lacks a file is left
    out with a warning.

    Raises:
        UserError: there are none, or two of one task.
    """
    found: dict[str, tuple[Path, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name.lower().replace("-", "").replace("_", "")
        if name not in _NAMES:
            continue
        development = next((path / name for name in _DEVELOPMENT if (path / name).is_file()), None)
        if not (path / "train.tsv").is_file() or development is None:
            warn(f"{path}: found no train.tsv with {' or '.join(_DEVELOPMENT)}; the task is left out")
            continue
        if name in found:
            raise UserError(f"data: found {found[name][0].parent} and {path}, expected one folder of {name}")
        found[name] = path / "train.tsv", development
    if not found:
        raise UserError(
            f"data: found no task of GLUE in {folder}, expected folders such as SST-2 or cola with "
            "train.tsv and dev.tsv"
        )
    return found


def fine_tune(
    folder: Path, step: int | None, tasks: dict[str, tuple[Path, Path]], config: EvaluateConfig, console: Console
) -> Fields | None:
    """Run every task with every seed, each a `cloze finetune` in its own process; None if a signal stopped it.

    Complete runs are not repeated, and refused if they are of another model, configuration or file. The development
    file is evaluated by the first metric of the task.

    Args:
        folder: folder of the model: a run or a Hugging Face folder.
        step: checkpoint of the run; None: the newest good one.

    Returns:
        `tasks`: by name, `metric`, `majority` (what the most frequent answer reaches; None: it is none of a few),
        `median`, `mean`, `deviation` and `seeds`; with `config.random_weights` also
        `random_weights`: the same of models of the same shape that are not pretrained.

    Raises:
        UserError: a run has failed or has read other inputs than were planned, a folder holds another one, or another
            job uses it.
    """
    assert config.output is not None, "EvaluateConfig asks for it"
    output = Path(config.output)
    step_option = ["--model_step", str(step)] if step is not None else []
    configs = _configured("tasks", tasks, output, ["--model", str(folder), *step_option], config)
    for (_, task), own in configs.items():
        metric = TASKS[task].metrics[0]
        if own.grid:
            raise UserError(
                f"finetune_config: found grid {', '.join(own.grid)} in {config.finetune_config}, expected none: means "
                "are over seeds of one setting, which cloze finetune --grid finds"
            )
        if own.evaluation.metric not in (AUTO, metric, f"validation/{metric}"):
            raise UserError(
                f"finetune_config: found evaluation.metric {own.evaluation.metric} in {config.finetune_config}, "
                f"expected auto: {task} is measured by {metric}"
            )
    with locked(output):  # before what the runs read is written or planned by what lies there
        if config.random_weights:
            part = output / _RANDOM
            configs |= _configured("random_weights", tasks, part, _random_weights(folder, part), config)
        begun: dict[str, int | None] = {}  # all tasks start from one checkpoint, though there may be a newer one now
        for own in configs.values():
            begun = steps_begun(own) | begun
        runs_of = {each: list(checked_runs(own, begun)) for each, own in configs.items()}
        planned = {each: with_configurations(Path(configs[each].output), of_task) for each, of_task in runs_of.items()}
        steps = sorted({str(own.model_step) for of_task in runs_of.values() for _, own in of_task if own.model_step})
        if steps:
            console.say(f"{folder}: fine-tuned from its checkpoint of step {', '.join(steps)}")
        by_seed = [run for of_seed in zip(*planned.values(), strict=True) for run in of_seed]
        shown = [replace(run, name=str(run.folder.relative_to(output))) for run in by_seed]
        with StopRequest() as stop:
            console.on_lost_reader(stop.lose_reader)
            if run_all(shown, visible_gpus() or [""], stop, console):
                return None
        if fault := fault_in_runs(shown):
            raise UserError(fault)
        found: dict[str, Fields] = {}
        for (start, task), of_task in planned.items():
            found.setdefault(start, {})[task] = _summary(task, of_task)
        return found


def _configured(
    start: str, tasks: dict[str, tuple[Path, Path]], output: Path, model: list[str], config: EvaluateConfig
) -> dict[tuple[str, str], FinetuneConfig]:
    """The configuration of each task's runs, by start and task.

    Args:
        start: what the results name these runs.
        model: the arguments of `cloze finetune` that name the model.
    """
    return {
        (start, task): configured(
            [task, *model, "--train_file", str(train), "--validation", str(development), "--output", str(output / task)]
            + ["--seed", "1", "--seeds", str(config.seeds), "--config", config.finetune_config]
        )
        for task, (train, development) in tasks.items()
    }


def _random_weights(folder: Path, output: Path) -> list[str]:
    """Write the configuration of a model.

    Returns:
        The arguments of `cloze finetune` for random weights of that shape.

    Raises:
        UserError: the runs there have another shape.
    """
    shape = runs.model_config(folder) if runs.is_pretraining(folder) else load_pretrained(runs.model_folder(folder))[0]
    path, text = output / "shape.yaml", dump_yaml(asdict(shape))
    if path.is_file() and runs.read_fields(path) != asdict(shape):
        raise UserError(f"output: found {path} of another model, expected that of {folder}; choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    publish_text(path, text)
    return ["--model", str(path), "--tokenizer", str(integrity.tokenizer_folder(folder))]


def _summary(task: str, planned: list[Run]) -> Fields:
    """The values of a task's runs, by seed."""
    values, metric = {}, TASKS[task].metrics[0]
    majority: float | None = None
    for seed, run in enumerate(planned, 1):
        results = run.results()
        if results is None:
            raise UserError(f"{run.folder}: the run has no result; {run.log} says why")
        metric, majority = results.metric.partition("/")[2], results.majority  # alike for all seeds
        value = 0.0 if results.value is None and metric in _UNDEFINED else results.value
        if metric != TASKS[task].metrics[0] or value is None or not -1 <= value <= 1:
            raise UserError(
                f"{run.folder / runs.RESULTS}: found no {TASKS[task].metrics[0]} of the validation file, expected it "
                f"as the metric; remove {run.folder}, and the same command runs it again"
            )
        values[str(seed)] = value
    spread = statistics_of(values)
    of_seeds = {name: spread[name] for name in ("median", "mean", "deviation")}
    return {"metric": metric, "majority": majority, **of_seeds, "seeds": values}
