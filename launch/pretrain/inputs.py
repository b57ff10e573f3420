"""The inputs of a pretraining run, opened and checked, and the configuration completed from them."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.data import TrainingData, open_data
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.factory import make_objective, objective_facts
from cloze.launch.pretrain.precheck import check_start
from cloze.launch.pretrain.schedules import run_masking
from cloze.launch.pretrain.validation import HeldOut, held_out_samples, resolve_metric
from cloze.launch.run import runs
from cloze.launch.system.plugins import make, own_class
from cloze.launch.training.callbacks import Callback
from cloze.model.flops import encoder_weights
from cloze.pipeline.loading.order import choose_streams


class RunInputs(NamedTuple):
    """What a run reads, and its configuration, complete except for the choices that depend on the device."""

    config: PretrainConfig
    data: TrainingData
    held_out: list[HeldOut]
    objective: Objective
    callbacks: list[Callback]
    facts: runs.Facts
    """Hashes of what it reads, for comparison with an earlier part of the run."""


def open_inputs(config: PretrainConfig, world_size: int) -> RunInputs:
    """Open the inputs of a run, check them, and complete the configuration; nothing is written.

    Raises:
        UserError: the configuration is wrong, or does not fit the data.
    """
    check_start(config)
    data, model = open_data(config)
    run_masking(config, data)  # also checks that masking.* is not set for shards that hold their masks
    size = encoder_weights(model.base_shape)
    config = replace(config, model=model, train=config.train.on(world_size).for_size(size))
    config = replace(config, data_streams=choose_data_streams(config, world_size))
    held_out = held_out_samples(config, data)
    config = resolve_metric(config, data, held_out)
    objective = make_objective(config)
    sets = {f"{runs.SET_HASH}{each.name}": each.manifest.hash for each in held_out if not each.own}
    pooled = "" if any(each.own for each in held_out) else ", ".join(sorted(str(each.name) for each in held_out))
    measured = {**sets, runs.POOLED_SETS: pooled} if held_out else {}
    facts = {**data.facts, **objective_facts(objective), **measured}
    return RunInputs(config, data, held_out, objective, make_callbacks(config), facts)


def make_callbacks(config: PretrainConfig) -> list[Callback]:
    """The callbacks that the configuration names.

    Raises:
        UserError: as `own_class`.
    """
    return [make("callbacks", name, own_class("callbacks", name, Callback), config, {}) for name in config.callbacks]


def choose_data_streams(config: PretrainConfig, world_size: int) -> int:
    """The number of data streams of the run: as given, as in its earlier starts, or by the batch sizes.

    Raises:
        UserError: its earlier starts had none.
    """
    sizes = list(config.train.batch_sizes.values())
    saved = runs.saved_data_streams(Path(config.output), config.checkpoint.accept_changes)
    if config.data_streams:
        return config.data_streams
    if saved is not None and not any(size % saved for size in sizes):  # otherwise the batch size has changed
        return saved
    return choose_streams(sizes, world_size, len(config.sources))
