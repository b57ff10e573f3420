"""`cloze export`: a run's newest good checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from launch import runs
from launch.config import ExportConfig
from launch.console import Console
from launch.environment import prepare_deepspeed, read_environment
from pipeline.errors import UserError


def export(config: ExportConfig) -> int:
    """Write config.json, model.safetensors and the tokenizer's files; returns the exit status."""
    prepare_deepspeed(read_environment())
    from launch.checkpoint import read_weights
    from model.config import BertConfig
    from model.hub import save_pretrained

    console = Console()
    run = Path(config.run)
    model_config = BertConfig(**runs.read_config(run)["model"])
    output = Path(config.output) if config.output else run.with_name(run.name + "-hf")
    if output.exists() and any(output.iterdir()):
        raise UserError(f"output: found {output} with files in it, expected a new or empty folder; remove it or choose "
                        "another --output")
    step, weights = read_weights(run, config.step, console.warn)
    save_pretrained(output, model_config, weights, run / runs.TOKENIZER)
    console.say(f"exported step {step} of {run} to {output}")
    return 0
