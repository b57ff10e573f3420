"""Results of a fine-tuning run: evaluations, results.json, predictions, the exported model."""

import json
import math
import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cloze.launch.checkpoint.completion import ending
from cloze.launch.checkpoint.state import TrainState
from cloze.launch.checkpoint.weights import read_weights
from cloze.launch.config import FinetuneConfig
from cloze.launch.config.tasks import Task
from cloze.launch.engine.engine import Engine
from cloze.launch.finetune import error_analysis
from cloze.launch.finetune.examples.base import Examples, predict
from cloze.launch.finetune.glue import submission, submission_names
from cloze.launch.finetune.job import Job
from cloze.launch.finetune.kind import Kind
from cloze.launch.finetune.models import head_options
from cloze.launch.pretrained.loading import cut_alike
from cloze.launch.pretrained.origin import read_origin, tokenizer_for_export
from cloze.launch.pretrained.source import warn_of_own_format
from cloze.launch.run import integrity, runs
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.status_file import RefusedStartError
from cloze.launch.run.store_retries import Patience
from cloze.launch.run.stored_run import StoredRun
from cloze.launch.sweeps.run import TEST_HASHES, no_better
from cloze.launch.system import distributed
from cloze.launch.system.console import Console, figure
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.pictures import can_draw
from cloze.launch.training.loop import Loop
from cloze.launch.training.process import Process
from cloze.model.bert import BertPreTrained
from cloze.model.config_files import FINGERPRINT
from cloze.model.huggingface import save_pretrained
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import clear, publish_json, publish_text, readable_errors


class Evaluation:
    """Evaluates the validation file, and shows errors in TensorBoard. Collective."""

    def __init__(self, examples: Examples, micro_batch_size: int, engine: Engine, environment: Environment) -> None:
        self._examples, self._micro_batch_size = examples, micro_batch_size
        self._engine, self._environment = engine, environment
        self._outputs = np.empty(0, np.float32)

    def __call__(self, beat: Callable[[], None]) -> dict[str, float]:
        """Metrics by name; `beat` is called after each micro-batch."""
        engine, environment = self._engine, self._environment
        engine.model.eval()
        self._outputs = predict(
            engine,
            self._examples,
            self._micro_batch_size,
            environment.rank,
            environment.world_size,
            engine.device,
            beat,
        )
        engine.model.train()
        return self._examples.metrics(self._outputs)

    def show(self, metrics: MetricsWriter | None, step: int) -> None:
        """Show the last evaluation: confused classes, worst errors, the precision-recall curve of two classes."""
        if not metrics:
            return
        predictions = self._examples.predictions(self._outputs)
        for name, table in error_analysis.tables(self._examples, predictions).items():
            metrics.text(f"validation/{name}", step, table)
        if scores := self._examples.errors.binary_scores(predictions):
            name, labels, probabilities = scores
            metrics.precision_recall(f"validation/precision and recall of {name}", step, labels, probabilities)


def _why_no_best(metric: str, best: int) -> str:
    """Why no checkpoint holds the best weights.

    Args:
        best: step of the best evaluation; -1: there was none.
    """
    if best < 0:
        return f"{metric} is undefined in every evaluation, as where all predictions are alike"
    return f"no evaluation had a better {metric} than the one at step {best}, which no checkpoint holds"


def check_metric(config: FinetuneConfig, state: TrainState, process: Process) -> None:
    """Refuse a deciding metric that a run at its end has not measured, before anything is written; one that goes on
    measures it, or its next evaluation says what there is. Collective.

    Raises:
        RefusedStartError: names what it has measured.
    """
    metric, folder = config.evaluation.metric, Path(config.output)
    at_its_end = state.evaluated_step == state.step and ending(config.train, state) is not None
    if state.best_metric in (None, metric) or not at_its_end:
        return
    with distributed.together("compare evaluation.metric", folder / runs.METRICS, process.device):
        lines = read_metrics(folder) if process.environment.is_main else []
        names = {name.removeprefix("validation/") for line in lines for name in line if name.startswith("validation/")}
        if process.environment.is_main and metric not in names:
            known = ", ".join(sorted(names)) or f"what {folder / runs.METRICS} says, which is empty"
            raise RefusedStartError(
                f"evaluation.metric: found {metric!r}, expected one of what is measured here: {known}"
            )


def _best_step(config: FinetuneConfig, loop: Loop, process: Process) -> int | None:
    """The step of the best checkpoint; None, with a warning: there is none, and the last one is taken. Collective."""
    state, metric = loop.progress.state, config.evaluation.metric
    if state.best_metric not in (None, metric):
        why = f"evaluation.metric: found {metric}, and the best checkpoint was chosen by {state.best_metric} when the "
        why += "run was made"
    # Checked by rank 0 only: others may see an outdated shared folder. The evaluation before step 1 is never saved.
    elif distributed.from_main(state.best_step in loop.checkpoints.steps(), process.device):
        return state.best_step
    else:
        why = _why_no_best(metric, state.best_step)
    process.console.warn(f"{why}; the last checkpoint is taken")
    return None


def report(job: Job, model_step: int | None, loop: Loop, process: Process, stop: StopRequest) -> bool:
    """Write results.json, predictions and the best checkpoint's model; upload them if it is in a store. Collective.

    Returns:
        False if a stop was requested between files: the next start writes the report again.
    """
    config, environment, console, device = job.config, process.environment, process.console, process.device
    state, checkpoints = loop.progress.state, loop.checkpoints
    submissions = submission_names(config)
    output = Path(config.output)
    best = _best_step(config, loop, process)
    step, weights = read_weights(output, checkpoints.bring(best), console.warn)
    console.say(
        f"measured with the checkpoint of step {step} of {state.step}, "
        + ("the last one" if best is None else f"the best by {config.evaluation.metric}")
    )
    model = job.architecture(loop.engine.model.config, **head_options(job.architecture, job.head, config))
    model.load_state_dict(weights)
    model.to(device).eval()
    torch.cuda.empty_cache()
    if environment.is_main:
        save_model(job, model, output)
    results = {
        "task": config.task,
        "model": config.model,
        "model_step": model_step,
        "seed": config.seed,
        "best_step": step,
        "steps": state.step,
        "metric": config.evaluation.metric,
        "majority": job.validation.majority(),
        TEST_HASHES: job.test_hashes,
        runs.MODEL_HASHES: integrity.hashes_of_model(output) if environment.is_main else {},
    }
    for split, examples in (("validation", job.validation), *((f"test/{each.name}", each) for each in job.test)):
        if distributed.on_any_rank(stop.wanted, device):
            return False
        outputs = predict(
            model,
            examples,
            config.train.micro_batch,
            environment.rank,
            environment.world_size,
            device,
            partial(process.heartbeat.beat, state.step, "evaluate"),
        )
        metrics = examples.metrics(outputs) if examples.labelled else {}
        results[split] = {"examples": examples.num_examples} | metrics
        if environment.is_main:
            predictions = _write_predictions(output / runs.PREDICTIONS, runs.stem_of(split), examples, outputs)
            if name := submissions.get(examples.name):
                publish_text(output / runs.PREDICTIONS / "glue" / name, submission(predictions))
        _say(split, metrics, examples.majority() if metrics else {}, config.evaluation.metric, console)
    if environment.is_main:
        publish_json(output / runs.RESULTS, _finite(results), ensure_ascii=False)
        warn_of_own_format(output / runs.MODEL, console)
    if run := process.stored:
        with distributed.together("send the results", run.place, device):
            if environment.is_main:
                _send(
                    run,
                    Patience(run.patience_seconds, console.warn, run.ended),
                    partial(process.heartbeat.beat, state.step, "save"),
                )
    return True


def _say(split: str, metrics: dict[str, float], majority: dict[str, float], deciding: str, console: Console) -> None:
    """Print a file's metrics, and whether one is no better than a constant prediction's: the deciding one, or where
    there is none of it (as of the loss) the task's first.
    """
    shown = "  ".join(f"{name} {figure(value)}" for name, value in metrics.items()) or "no labels: predicted only"
    console.say(f"{split}: {shown}")
    name = deciding if deciding in majority else next(iter(majority), None)
    if name is not None and (why := no_better(f"{split}/{name}", metrics[name], majority[name])):
        console.warn(why)


def _send(run: StoredRun, patience: Patience, beat: Callable[[], None]) -> None:
    """Upload the rest of a run to its store; last the file that marks it as a complete model (runs.is_pretraining)."""
    last = run.folder / runs.MODEL / "config.json"
    paths = [path for name in (runs.PREDICTIONS, runs.MODEL) for path in sorted((run.folder / name).rglob("*"))]
    for path in [*(path for path in paths if path.is_file() and path != last), run.folder / runs.RESULTS, last]:
        beat()
        patience(partial(run.send, path))


def where(config: FinetuneConfig, task: Task, kind: Kind, run: StoredRun | None) -> list[str]:
    """The last lines of a run: the paths of its files, and a command to use the model."""
    output = run.place if run else Path(config.output)
    command = kind.next_command(config, task).format(run=shlex.quote(str(output)))
    folder = run.folder if run else Path(config.output)
    drawn = sorted((folder / runs.PREDICTIONS).glob("validation-confusion*.png"))
    return [
        f"model     {output / runs.MODEL}",
        f"results   {output / runs.RESULTS}, {output / runs.PREDICTIONS / 'validation.jsonl'}",
        f"mistakes  {output / runs.PREDICTIONS / 'validation-mistakes.md'}",
        *(f"confusion {output / runs.PREDICTIONS / picture.name}" for picture in drawn),
        f"next      cloze {command}",
    ]


def _finite(value: object) -> object:
    """NaN (a correlation with constant predictions) and infinity in results as null: JSON has neither."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_predictions(folder: Path, name: str, examples: Examples, outputs: np.ndarray) -> list[Fields]:
    """Write one JSON object per line; if the examples have labels, also a page with confusions and the worst errors,
    and with matplotlib pictures of the confusions.
    """
    predictions = examples.predictions(outputs)
    lines = (json.dumps(_finite(each), ensure_ascii=False) + "\n" for each in predictions)
    publish_text(folder / f"{name}.jsonl", "".join(lines))
    if examples.labelled:
        publish_text(folder / f"{name}-mistakes.md", error_analysis.page(examples, predictions))
        if can_draw():
            drawn: set[str] = set()
            for title, matrix in examples.errors.matrices(predictions).items():
                file = re.sub(r"[^\w.-]", "_", title.replace(" ", "-", 1))
                while file in drawn:  # of a column whose name differs in such characters alone
                    file += "_"
                drawn.add(file)
                error_analysis.draw_confusion(matrix, f"{name}: {title}", folder / f"{name}-{file}.png")
    return predictions


def save_model(job: Job, model: BertPreTrained, output: Path) -> None:
    """Write DIR/model: a Hugging Face folder with labels, task, the tokenizer's fingerprint and how texts are
    encoded.
    """
    notes: Fields = {"finetuning_task": job.config.task, FINGERPRINT: job.source.tokenizer.fingerprint}
    notes |= job.kind.notes(job.config, job.task, job.train)
    aside = output / (runs.MODEL + ".tmp")
    clear(aside, ignore_errors=True)
    with readable_errors(aside):
        save_pretrained(
            aside,
            model.config,
            model.state_dict(),
            tokenizer_for_export(output),
            architecture=job.kind.saved_as or type(model).__name__,
            head=job.head,
            notes=notes,
            origin=read_origin(output),
        )
        cut_alike(aside, notes)
        clear(output / runs.MODEL, ignore_errors=True)
        os.replace(aside, output / runs.MODEL)
