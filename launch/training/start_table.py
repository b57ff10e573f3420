"""The table that a run prints at its start, read off the live engine."""

from pathlib import Path

import torch

from cloze.launch.config import BatchArithmetic, RunConfig
from cloze.launch.config.training import AUTO
from cloze.launch.engine.engine import Engine
from cloze.launch.run.metrics import tensorboard_command
from cloze.launch.system.devices import device_name, peak_flops
from cloze.launch.training.process import Process
from cloze.launch.training.schedules import describe
from cloze.model.attention import select_kernel
from cloze.pipeline.stores.places import is_url


def origin_of_rate(given: float | str, size: int, whose: str = "the model's") -> str:
    """How the peak learning rate was chosen, in words.

    Args:
        given: the user's value, or auto.
        size: parameters of the encoder's layers.
        whose: of which shape, in words.
    """
    if given != AUTO:
        return "as given"
    count = f"{size / 1e6:,.1f} million" if size >= 1e5 else f"{size:,}"
    return f"by {whose} size ({count} parameters in its layers); --train.learning_rate sets another"


def training_facts(
    config: RunConfig, process: Process, engine: Engine, epochs: str, rate: str = ""
) -> list[tuple[str, str]]:
    """Rows of the table printed at the start, read off the engine.

    Args:
        epochs: length of the run in epochs, in words.
        rate: how the peak rate was chosen; empty: printed already.
    """
    train, world_size = config.train, process.environment.world_size
    at_most = "" if train.time_budget_hours is None else "at most "
    peak = peak_flops(process.device, engine.dtype)
    return [
        ("batch", str(BatchArithmetic.of(train, world_size))),
        ("steps", f"{at_most}{train.max_steps:,} = {epochs}"),
        ("precision", engine.precision),
        ("optimizer", f"{engine.optimizer_name}, ZeRO stage {engine.stage}"),
        (
            "learning rate",
            f"{train.learning_rate:g} peak, {describe(config.schedule, train)}"
            + (f"; the peak {rate}" if rate else ""),
        ),
        (
            "attention kernel",
            _live_kernel(engine, process.device) + (", compiled layers" if engine.model.bert.encoder.compiled else ""),
        ),
        (
            "device",
            f"{world_size} x {device_name(process.device)}{_threads(process.device)}"
            + (f", {peak / 1e12:.3g} TFLOP/s peak" if peak else ""),
        ),
        ("curves", _curves_command(process.shown(config).output)),
    ]


def _threads(device: torch.device) -> str:
    """A CPU's threads, and what sets another number."""
    if device.type != "cpu":
        return ""
    count = torch.get_num_threads()
    return f" of {count} thread{'s' * (count > 1)} (OMP_NUM_THREADS sets another number)"


def _curves_command(output: str) -> str:
    """The command that shows the run's curves; of a run in a store it fetches them."""
    return f"cloze status {output} --curves FOLDER" if is_url(output) else tensorboard_command(Path(output))


def _live_kernel(engine: Engine, device: torch.device) -> str:
    """Name of the attention kernel that training with this engine on this device uses."""
    bert = engine.model.bert
    tokens = torch.empty(0, bert.config.hidden_size, dtype=engine.dtype, device=device)
    return select_kernel(bert.attention_kernel, bert.config, tokens, False)
