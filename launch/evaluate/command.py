"""`cloze evaluate`: evaluates a model, a checkpoint or all checkpoints of a run on a suite."""

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cloze.launch.checkpoint.state import CHECKSUMS, checkpoint_steps
from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.evaluate.likelihood import ScoringProgress
from cloze.launch.evaluate.lines import read_lines, score_lines
from cloze.launch.evaluate.pairs import accuracies, read_pairs, score_pairs
from cloze.launch.evaluate.report import draw, is_result, print_result, print_tasks, scalars
from cloze.launch.predict.blanks import Score
from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.finding import model_path
from cloze.launch.run import runs
from cloze.launch.run.tensorboard_files import board_in
from cloze.launch.system.console import Console, clock, doing
from cloze.launch.system.environment.process import importing_deepspeed
from cloze.launch.system.exit_status import EXIT_COMPLETE, EXIT_REQUEUE
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_json, sha256_of
from cloze.pipeline.stores.places import is_url
from cloze.pipeline.untrusted import read_json

_CHECKPOINT = re.compile(r"step-(\d+)")


def evaluate(config: EvaluateConfig) -> int:
    """Run the evaluation, print and write its results.

    Returns:
        The exit status.
    """
    console = Console()
    folder, step = _model(config)
    if config.suite == "glue":
        return _fine_tune(config, folder, step, console)
    texts, measure = _suite(config)
    if config.every_checkpoint:
        return _every_checkpoint(config, folder, texts, measure, console)
    began = time.monotonic()
    result = measure(Predictor.from_folder(folder, step))
    print_result(console, f"{config.suite}: {config.model}", result)
    console.say(f"measured in {clock(time.monotonic() - began)}")
    if config.json:
        publish_json(Path(config.json), result)
    if config.picture:
        draw(Path(config.picture), config.model, result)
    return EXIT_COMPLETE


def _fine_tune(config: EvaluateConfig, folder: Path, step: int | Literal["best"] | None, console: Console) -> int:
    if step == "best":
        raise UserError("step: found best with suite glue, expected a number or null")
    with importing_deepspeed():
        from cloze.launch.evaluate import glue

    result = glue.fine_tune(folder, step, glue.find_tasks(Path(config.data), console.warn), config, console)
    if result is None:
        console.say("stopped; the same command continues")
        return EXIT_REQUEUE
    print_tasks(console, f"{config.suite}: {config.model}", result)
    if config.json:
        publish_json(Path(config.json), result)
    return EXIT_COMPLETE


def _model(config: EvaluateConfig) -> tuple[Path, int | Literal["best"] | None]:
    """The model's folder and the step; the folder of a checkpoint, RUN/checkpoints/step-00001000, determines both."""
    if config.every_checkpoint and is_url(config.model):
        raise UserError(
            f"every_checkpoint: found true with {config.model}, expected a folder, where results are kept "
            "next to the checkpoints; name a checkpoint with step"
        )
    folder = model_path(config, config.step)
    match = _CHECKPOINT.fullmatch(folder.resolve().name)
    if not match or folder.resolve().parent.name != runs.CHECKPOINTS:
        return folder, config.step
    if config.step is not None or config.every_checkpoint:
        raise UserError(
            f"model: found the checkpoint {folder} with step or every_checkpoint, expected the folder of "
            "its run with them"
        )
    return folder.resolve().parents[1], int(match[1])


def _suite(config: EvaluateConfig) -> tuple[list[str], Callable[[Predictor], Fields]]:
    """Read the suite's texts; returns them, and what measures a model on them."""
    if config.suite == "lines":
        lines = read_lines(config.data, config.every_nth)

        def on_lines(predictor: Predictor) -> Fields:
            predictor.require(Score())
            with doing() as tell:
                return score_lines(
                    predictor.loaded,
                    lines,
                    max_length=config.max_length,
                    bf16=config.precision == "bf16",
                    hidden=config.hidden,
                    progress=ScoringProgress(tell),
                )

        return lines, on_lines
    pairs = read_pairs(Path(config.data), config.every_nth)

    def on_pairs(predictor: Predictor) -> Fields:
        predictor.require(Score())
        with doing() as tell:
            scores = score_pairs(predictor.loaded, pairs, config.precision, config.hidden, ScoringProgress(tell))
        return accuracies(pairs, scores)

    return [text for pair in pairs for text in (pair.paradigm, pair.phenomenon, pair.good, pair.bad)], on_pairs


def _every_checkpoint(
    config: EvaluateConfig, run: Path, texts: list[str], measure: Callable[[Predictor], Fields], console: Console
) -> int:
    """Evaluate the run's current checkpoints that have no result yet, oldest first; then write all curves again.

    Args:
        texts: of the suite; their hash tells results on other data of the same name.
    """
    if not runs.is_pretraining(run):
        raise UserError(f"every_checkpoint: found {run}, which is no run of pretraining, expected one; leave it out")
    folder = run / (f"evaluate-{config.suite}" + ("-causal" if config.score == "causal" else ""))
    settings = {name: getattr(config, name) for name in ("precision", "every_nth", "max_length")}
    settings["rest_of_word"] = config.hidden == "rest_of_word"
    settings["data"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    for step in checkpoint_steps(run):
        path, checkpoint = folder / _result_name(step), _checkpoint_hash(run, step)
        saved = _saved(path, config.suite, settings)
        if saved is not None and saved.get("checkpoint") == checkpoint:
            continue
        try:
            predictor = Predictor.from_folder(run, step)
        except (UserError, OSError):
            if step in checkpoint_steps(run):
                raise
            console.warn(f"{run}: the checkpoint of step {step} has been removed by the run since; skipped")
            continue
        result = measure(predictor)
        publish_json(path, {"step": step, "checkpoint": checkpoint, "settings": settings, "result": result})
        console.say(
            f"step {step}  "
            + "  ".join(
                f"{name.split('/')[1]} {value:.4f}"
                for name, value in scalars(config.suite, result).items()
                if name.startswith(f"{config.suite}/")
            )
        )
    _write_curves(config.suite, folder, settings)
    return EXIT_COMPLETE


def _checkpoint_hash(run: Path, step: int) -> str | None:
    """SHA-256 of the file that lists the hashes of a checkpoint's files; None: it has been removed. A run that goes on
    from an earlier step writes others at the same steps.
    """
    path = run / runs.CHECKPOINTS / runs.step_name(step) / CHECKSUMS
    return sha256_of(path) if path.is_file() else None


def _write_curves(suite: str, folder: Path, settings: Fields) -> None:
    """Write a folder's results with these settings as TensorBoard events, in the order of the steps."""
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with board_in(folder) as board:
        for path in sorted(folder.glob("step-*.json")):
            if (content := _saved(path, suite, settings)) is not None:
                for name, value in scalars(suite, content["result"]).items():
                    board.add_scalar(name, value, content["step"])


def _result_name(step: int) -> str:
    """Name of the file with the results of a checkpoint."""
    return f"{runs.step_name(step)}.json"


def _saved(path: Path, suite: str, settings: Fields) -> Fields | None:
    """A result of a suite with these settings; None if there is none or it is damaged."""
    try:
        content = read_json(path)
        whole = path.name == _result_name(content["step"]) and is_result(suite, content["result"])
        return content if whole and content["settings"] == settings else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
