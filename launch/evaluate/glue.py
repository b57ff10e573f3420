"""Fine-tuning as a measure: GLUE's tasks (Wang et al. 2019, arXiv 1804.07461), several seeds each."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from cloze.launch.config.tasks import TASKS
from cloze.launch.finetune.sweep import Run, run_all
from cloze.launch.system.console import Console
from cloze.launch.system.environment import visible_gpus
from cloze.pipeline.errors import UserError

# Tasks of GLUE, as `cloze finetune` knows them; a folder is named so, or as GLUE's archive has it: SST-2 is sst2.
_NAMES = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
_DEVELOPMENT = ("dev.tsv", "dev_matched.tsv")


def find_tasks(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Task -> its file to learn from and the one to measure, for every task that has a folder here.

    Raises:
        UserError: there is none.
    """
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name.lower().replace("-", "").replace("_", "")
        development = next((path / name for name in _DEVELOPMENT if (path / name).is_file()), None)
        if name in _NAMES and (path / "train.tsv").is_file() and development:
            found[name] = path / "train.tsv", development
    if not found:
        raise UserError(f"data: found no task of GLUE in {folder}, expected folders such as SST-2 or cola with "
                        "train.tsv and dev.tsv")
    return found


def fine_tune(model: str, tasks: dict[str, tuple[Path, Path]], output: Path, options: list[str], seeds: int,
              console: Console) -> dict | None:
    """Run every task with every seed, each a `cloze finetune` of its own; None if it was asked to stop.

    A run that is complete is not repeated. Measured is the development file, by the first metric of the task.

    Args:
        options: further arguments of each run.

    Raises:
        UserError: a run has failed.
    """
    planned = {
        (task, seed): Run(f"{task}/seed-{seed}", output / task / f"seed-{seed}", {}, [
            sys.executable, "-m", "cloze", "finetune", task, "--model", model, "--train", str(train), "--validation",
            str(development), "--output", str(output / task / f"seed-{seed}"), "--seed", str(seed), *options,
        ]) for seed in range(1, seeds + 1) for task, (train, development) in tasks.items()
    }
    if run_all(list(planned.values()), visible_gpus() or [""], console):
        return None
    results = {}
    for task in tasks:
        values = {}
        for seed in range(1, seeds + 1):
            run = planned[task, seed]
            found = run.results()
            if found is None:
                raise UserError(f"{run.folder}: the run has no result; {run.log} says why")
            values[str(seed)] = found["validation"][found["metric"]] or 0.0  # a correlation of constants is none
        numbers = list(values.values())
        results[task] = {
            "metric": TASKS[task].metrics[0], "median": statistics.median(numbers), "mean": statistics.fmean(numbers),
            "deviation": statistics.stdev(numbers) if len(numbers) > 1 else None, "seeds": values,
        }
    return {"tasks": results}
