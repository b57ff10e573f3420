"""The validation data of a pretraining run, and what is shown beside its losses."""

import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cloze.launch.checkpoint.completion import with_metric
from cloze.launch.config import PretrainConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.pretrain.data import TrainingData, check_alike, check_manifest
from cloze.launch.pretrain.readers import open_cache, open_split
from cloze.launch.pretrain.sample_predictions import SamplePredictions
from cloze.launch.run import runs
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.system.plugins import own_class
from cloze.launch.training.callbacks import Callback
from cloze.launch.training.evaluation import ValidationSet
from cloze.launch.training.process import Process
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import evaluation_batches
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.stores.places import to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer


class HeldOut(NamedTuple):
    """Held-out samples that a run is evaluated on."""

    name: str | None
    """Name of the source in a mixture, or of the set in `evaluation.sets`; None: the run's only folder."""
    manifest: Manifest
    own: bool
    """Whether they belong to the data that the run trains on."""


def held_out_samples(config: PretrainConfig, data: TrainingData) -> list[HeldOut]:
    """The validation splits of the run's data and of `evaluation.sets`, without empty ones.

    Raises:
        UserError: a set has another tokenizer, a field needs a validation split that is empty, or a masking rate is
        given although all shards hold their masks.
    """
    sets = [HeldOut(name, each, True) for name, each in zip(data.names or (None,), data.manifests, strict=True)]
    for name, path in config.evaluation.sets.items():
        manifest = Manifest.load(to_place(path))
        check_alike([data.manifest], manifest, "evaluation.sets")
        check_manifest(manifest, config.model, config.train.sequence_length)
        sets.append(HeldOut(name, manifest, False))
    sets = [each for each in sets if each.manifest.splits["validation"].counts.get("samples")]
    if not sets:
        for field in ("keep_best", "patience", "target"):
            if getattr(config.evaluation, field):
                raise UserError(
                    f"evaluation.{field}: found {getattr(config.evaluation, field)}, expected none: the "
                    f"validation split of {data.manifest.folder} is empty; prepare the data with one"
                )
    rate = config.evaluation.masking_rate
    if rate is not None and sets and all(each.manifest.mask_sets for each in sets):
        raise UserError(
            f"evaluation.masking_rate: found {rate} with shards in {sets[0].manifest.folder} that hold their "
            "masks, expected null; or prepare them with --masking.mode dynamic"
        )
    return sets


def resolve_metric(config: PretrainConfig, data: TrainingData, held_out: list[HeldOut]) -> PretrainConfig:
    """The configuration, in which `evaluation.metric` auto has become the name of a curve.

    Raises:
        UserError: the metric is of a validation set that the run does not have.
    """
    config = with_metric(config, f"loss/{data.names[0]}" if data.names and held_out else "loss")
    metric = config.evaluation.metric
    curve, _, name = metric.partition("/")
    names = [each.name for each in held_out if each.name is not None]
    callbacks = [own_class("callbacks", each, Callback) for each in config.callbacks]
    measures = any(each.on_evaluation is not Callback.on_evaluation for each in callbacks)  # any curve, perhaps
    if name and name not in names and not measures:
        known = " or ".join([curve, *(f"{curve}/{each}" for each in names)])
        empty = name in (*data.names, *config.evaluation.sets)
        raise UserError(
            f"evaluation.metric: found {metric!r}, expected {known}: "
            + (
                f"the validation split of {name} is empty; prepare it with --split.validation 0.05, or "
                if empty
                else f"no validation set of this run has the name {name}; "
            )
            + f"use --evaluation.metric {curve}"
        )
    return config


def open_validation(
    config: PretrainConfig, held_out: list[HeldOut], process: Process
) -> list[tuple[HeldOut, ShardReader]]:
    """The held-out samples with their readers. Collective.

    Raises:
        UserError: as `open_split`.
    """
    place = process.environment, process.device
    return [(each, open_split(config, each.manifest.folder, "validation", *place)) for each in held_out]


def validation_sets(
    config: PretrainConfig, opened: list[tuple[HeldOut, ShardReader]], process: Process
) -> list[ValidationSet]:
    """The validation sets, in micro-batches of the run's size.

    Args:
        opened: as of `open_validation`.
    """
    environment = process.environment
    pooled = any(each.own for each, _ in opened)  # only the additional sets, if the data has no validation split
    return [
        ValidationSet(
            each.name,
            each.own or not pooled,
            partial(
                evaluation_batches,
                reader,
                micro_batch_size=config.train.micro_batch,
                rank=environment.rank,
                world_size=environment.world_size,
                max_samples=config.evaluation.samples,
                segments=config.model.segments,
                rate=config.evaluation.masking_rate,
            ),
        )
        for each, reader in opened
    ]


def make_show(
    config: PretrainConfig, data: TrainingData, engine: Engine, metrics: MetricsWriter | None
) -> Callable[[int], None]:
    """A function that each evaluation calls to show predictions for masked tokens (of a mixture's first source with
    held-out samples) and word embeddings.
    """
    readers = [
        ShardReader(manifest.folder, "validation", check_sizes=False, cache=open_cache(config, manifest.folder))
        for manifest in data.manifests
    ]
    reader = max(readers, key=lambda each: each.num_samples > 0)
    tokenizer = Tokenizer.from_folder(data.manifest.folder / runs.TOKENIZER)
    count = min(config.monitor.examples, reader.num_samples)
    guesses = count and SamplePredictions(engine, reader, tokenizer, count, config.model.segments, metrics)

    def show(step: int) -> None:
        if guesses:
            guesses(step)
        if config.monitor.embeddings:
            table = engine.full_parameter(engine.model.bert.embeddings.word.weight)
            if metrics:
                names = [json.dumps(token)[1:-1] or "?" for token in tokenizer.tokens]  # no tabs, no line breaks
                metrics.embeddings(step, table[: len(names)], names)

    return show
