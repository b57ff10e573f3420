"""Fine-tuning sweeps: a run for each seed and combination of settings; results as a table and a picture."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from cloze.launch.config import FinetuneConfig
from cloze.launch.finetune.job import read_job
from cloze.launch.parsing import parse
from cloze.launch.run import runs
from cloze.launch.run.resume_check import check_folder
from cloze.launch.sweeps.planning import arguments_of, combinations, command_of, part_of_name, with_configurations
from cloze.launch.sweeps.results import Sweep
from cloze.launch.sweeps.run import Run, file_of
from cloze.launch.system.console import Console
from cloze.launch.system.environment.gpus import visible_gpus
from cloze.launch.system.exit_status import EXIT_COMPLETE, EXIT_REQUEUE
from cloze.launch.system.pictures import check_library
from cloze.launch.training.shortening import shorten
from cloze.pipeline.untrusted import dump_yaml

# Fields that a grid may not set: they differ between runs anyway, or would make results incomparable.
_NO_SETTINGS = (
    *("task", "output", "seed", "seeds", "grid"),
    *("evaluation.metric", "validation", "label_columns", "embedding.scored_columns", "answer_units"),
)


def sweep(config: FinetuneConfig) -> int:
    """Run every combination with every seed, each in a process of its own.

    One run at a time on each visible GPU; one after another on a CPU. Complete runs are not repeated; interrupted ones
    are resumed.

    Returns:
        The exit status.

    Raises:
        UserError: a setting or a file is wrong, or the folder holds the runs of another sweep.
    """
    check_library("seeds")
    facts = {"task": config.task, "model": config.model}
    done = Sweep(Path(config.output), plan(config), "at the best checkpoint", facts)
    return EXIT_COMPLETE if done.reach_end(visible_gpus() or [""], Console()) else EXIT_REQUEUE


def plan(config: FinetuneConfig) -> list[Run]:
    """All runs, after all inputs were read."""
    return with_configurations(Path(config.output), checked_runs(config, steps_begun(config)))


def configured(words: list[str]) -> FinetuneConfig:
    """The configuration of a fine-tuning from the words of its command. Raises UserError as `parsing.parse`."""
    return parse("finetune", FinetuneConfig, words, words="task", configs="finetune", complete=shorten)


def checked_runs(config: FinetuneConfig, steps: dict[str, int | None]) -> Iterator[tuple[Run, FinetuneConfig]]:
    """Each run and its configuration, after a check that its folder holds nothing but an earlier part of it.

    Args:
        steps: by model, the checkpoint from which its runs begin; those of other models are added, since the newest one
            may change.

    Raises:
        UserError: a setting or a file is wrong, or a folder holds another run.
    """
    folder = Path(config.output)
    for settings, chosen in _settings(config):
        newest = chosen.model_step is None
        job = read_job(replace(chosen, model_step=steps.get(chosen.model)) if newest else chosen)
        step, facts = job.source.step, job.facts
        if newest:
            steps[chosen.model] = step
        for seed in range(config.seed, config.seed + config.seeds):
            name = _name(settings, seed)
            output = folder / name
            own = replace(chosen, seed=seed, output=str(output), model_step=step)
            resolved = replace(job.config, seed=seed, output=own.output, model_step=step)
            check_folder(resolved, facts)
            command = command_of(["finetune", config.task], output)
            yield Run(name, output, settings, command, facts, job.test_hashes, resolved), own


def steps_begun(config: FinetuneConfig) -> dict[str, int | None]:
    """By model, the checkpoint from which earlier runs of this sweep began: there may be a newer one now."""
    steps: dict[str, int | None] = {}
    for settings, chosen in _settings(config):
        for seed in range(config.seed, config.seed + config.seeds) if chosen.model_step is None else ():
            path = file_of(Path(config.output) / _name(settings, seed))
            begun = runs.read_fields(path) if path.is_file() else {}
            if begun.get("model") == chosen.model and type(begun.get("model_step")) is int:
                steps.setdefault(chosen.model, begun["model_step"])
    return steps


def _settings(config: FinetuneConfig) -> list[tuple[dict[str, str], FinetuneConfig]]:
    """Each combination of the grid, and the configuration with it."""
    base = dump_yaml(asdict(replace(config, seeds=1, grid=[])))
    return [
        (settings, configured([config.task, "--config", base, *arguments_of(settings)]))
        for settings in combinations(config.grid, _NO_SETTINGS)
    ]


def _name(settings: dict[str, str], seed: int) -> str:
    return f"{part_of_name(settings)}/seed-{seed}" if settings else f"seed-{seed}"
