"""`cloze export`: a run's newest good checkpoint as a Hugging Face folder, and as an ONNX graph."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from cloze.launch.config import ExportConfig
from cloze.launch.pretrain.objectives.replaced_tokens import GENERATOR, generator_config
from cloze.launch.pretrained.finding import fetched_run
from cloze.launch.pretrained.hub import check_push, push_model
from cloze.launch.pretrained.loading import cut_alike, read_run_average
from cloze.launch.pretrained.origin import check_tokenizer, read_origin, tokenizer_for_export
from cloze.launch.pretrained.source import warn_of_own_format
from cloze.launch.run import integrity, runs
from cloze.launch.system.console import Console
from cloze.launch.texts.settings import TRUNCATION, Truncation, described
from cloze.launch.tools.card import card, write_pooling
from cloze.launch.tools.exported_code import write_remote_code
from cloze.launch.tools.onnx import check_installed, write_onnx
from cloze.model.config import BertConfig
from cloze.model.config_files import FINGERPRINT
from cloze.model.huggingface import (
    cast_pretrained,
    check_finite,
    check_sizes,
    copy_pretrained,
    load_note,
    save_pretrained,
)
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import ASIDE, OF_FILE_SYSTEM, aside_of, clear, holding, readable_errors
from cloze.pipeline.stores.places import is_url, to_local, to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(config: ExportConfig) -> int:
    """Write config.json, model.safetensors, the tokenizer's files, a model card and, for encoders, the pooling; with
    `onnx` also a graph.

    Returns:
        The exit status.
    """
    console = Console()
    # "." has no name of its own; beside a run in a store nothing can be put
    named = to_place(config.run).name if is_url(config.run) else os.path.abspath(config.run)
    output = to_local(config.output or f"{named}-hf", "output")
    _check_free(output)
    if config.onnx:
        check_installed()
    if config.push:
        check_push(config.push)
    run = fetched_run(config.run, config.step, config.average) if is_url(config.run) else Path(config.run)
    whole = Path(os.path.realpath(output))
    with readable_errors(output), _aside(whole) as aside:
        said = (
            _write_checkpoint(config, run, aside, console)
            if runs.is_pretraining(run)
            else _copy_model(config, run, aside, console)
        )
        if config.onnx:
            write_onnx(aside)
        if config.dtype:
            cast_pretrained(aside, _DTYPES[config.dtype])
        write_remote_code(aside)
        (aside / "README.md").write_text(card(run, aside, whole.name, said), encoding="utf-8")
        _publish(aside, whole)
    console.say(f"exported {said} to {output}" + (", with an ONNX graph" if config.onnx else ""))
    warn_of_own_format(whole, console)
    if config.push:
        console.say(f"pushed to {push_model(whole, config.push, private=config.private)}")
    return 0


def _check_free(output: Path) -> None:
    """Raise UserError for what is there and no empty folder. Temporary files of a killed export do not count, nor does
    what a new file system has.
    """
    if not output.exists():
        return
    content = [path.name for path in output.iterdir()] if output.is_dir() else [output.name]
    if any(not name.startswith(ASIDE) and name not in (OF_FILE_SYSTEM, runs.LOCK) for name in content):
        raise UserError(
            f"output: found {output} there already, expected a new or empty folder; remove it or choose "
            "another --output"
        )


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """Yield the path of a folder to write, which is removed at the end: beside the output, or in it if it is there,
    since that may be a mount. No other export then uses it meanwhile.

    Raises:
        UserError: another one does.
    """
    aside = aside_of(output)
    with ExitStack() as stack:
        if output.is_dir():
            aside, lock = output / f"{ASIDE}export", output / runs.LOCK  # which a run that begins there takes
            if not stack.enter_context(holding(lock)):
                raise UserError(
                    f"output: found {output} in use by another export or a run, expected a folder of its own; choose "
                    "another --output"
                )
            stack.callback(clear, lock, ignore_errors=True)  # another user's, perhaps
            _check_free(output)
            clear(aside)  # of a killed export; other temporary files are those of exports into folders below
        stack.callback(clear, aside, ignore_errors=True)
        yield aside


def _publish(aside: Path, output: Path) -> None:
    """Give a whole model folder its name, or, in the empty folder of this name, its files theirs: that one may be a
    mount, which nothing can replace, or the folder in which the user stands. Its config.json, without which it is no
    model, comes last.

    Raises:
        UserError: another process was faster.
        OSError: the disk refuses.
    """
    if aside.parent == output:
        for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, output / path.name)
        return
    try:
        os.replace(aside, output)
    except OSError:
        _check_free(output)
        if output.is_dir():
            raise UserError(
                f"output: found {output} there meanwhile, expected a folder that nothing else uses; choose another "
                "--output"
            ) from None
        raise


def _write_checkpoint(config: ExportConfig, run: Path, folder: Path, console: Console) -> str:
    """Write the model folder of a pretraining checkpoint; returns a description of it."""
    model_config = _generator_config(run) if config.generator else runs.model_config(run)
    part = GENERATOR if config.generator else ""
    steps, weights = read_run_average(run, config.average, config.step, console.warn, part=part, ema=config.ema)
    named = ", ".join(map(str, steps))
    shown = config.run if is_url(config.run) else run
    said = f"step {named} of {shown}" if len(steps) == 1 else f"the mean of steps {named} of {shown}"
    said = f"the generator in {said}" if config.generator else said
    said = f"the average of the weights at {said}" if config.ema else said
    check_finite(weights, said)
    check_sizes(model_config, weights, said)
    length = runs.trained_length(run)
    notes = {TRUNCATION: described(Truncation(length))} if length else {}
    save_pretrained(folder, model_config, weights, tokenizer_for_export(run), notes=notes, origin=read_origin(run))
    cut_alike(folder, notes)
    write_pooling(folder, folder)
    return said


def _generator_config(run: Path) -> BertConfig:
    """Configuration of the generator of a run with replaced_tokens.

    Raises:
        UserError: for other runs.
    """
    given = runs.fields_of(run)
    if given.get("objective") != "replaced_tokens":
        raise UserError(
            f"generator: found true with {run}, a run with objective {given.get('objective', 'masked')}, "
            "expected one with replaced_tokens; leave --generator out"
        )
    options: Fields = {
        name: given[f"objective_options.{name}"]
        for name in ("generator_size", "generator_layers")
        if f"objective_options.{name}" in given
    }
    return generator_config(runs.model_config(run), **options)


def _copy_model(config: ExportConfig, run: Path, folder: Path, console: Console) -> str:
    """Copy the model folder of a fine-tuning run, or the folder `run`; returns a description of it."""
    integrity.check_model(run)
    source = runs.model_folder(run)
    if not (source / "config.json").is_file():
        raise UserError(
            f"run: found neither a run nor a model in {run}, expected the folder of a run of cloze "
            "pretrain or finetune, or a Hugging Face folder"
        )
    for name, plain in (("step", None), ("average", 1), ("generator", False), ("ema", False)):
        if (found := getattr(config, name)) != plain:
            raise UserError(
                f"{name}: found {found} with {source}, which is one model, expected "
                f"{'null' if plain is None else str(plain).lower()}; leave --{name} out"
            )
    if load_note(source, FINGERPRINT) is not None:  # another's tokenizer may be of a kind that only its library reads
        check_tokenizer(Tokenizer.from_folder(source), source)
    others = copy_pretrained(source, folder)
    write_pooling(folder, source)
    if left := [name for name in others if not (folder / name).exists()]:
        console.say(f"left out of {source}: {', '.join(left)} (a model and its tokenizer are exported, nothing else)")
    return str(source)
