"""`cloze export`: a run's newest good checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from launch import runs
from launch.config import ExportConfig
from launch.console import Console
from launch.environment import prepare_deepspeed, read_environment
from pipeline.errors import UserError
from pipeline.storage import readable_errors


def export(config: ExportConfig) -> int:
    """Write config.json, model.safetensors and the tokenizer's files; returns the exit status."""
    prepare_deepspeed(read_environment())
    from launch.checkpoint import read_weights
    from model.hub import save_pretrained

    console = Console()
    run = Path(config.run)
    model_config = runs.model_config(run)
    output = Path(config.output) if config.output else run.with_name(run.name + "-hf")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"output: found {output} there already, expected a new or empty folder; remove it or choose "
                        "another --output")
    step, weights = read_weights(run, config.step, console.warn)
    aside = output.with_name(output.name + ".tmp")  # renamed when it is whole
    shutil.rmtree(aside, ignore_errors=True)
    with readable_errors(output):
        save_pretrained(aside, model_config, weights, run / runs.TOKENIZER)
        os.replace(aside, output)
    console.say(f"exported step {step} of {run} to {output}")
    return 0
