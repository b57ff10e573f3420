"""The validation data of a pretraining run, and what is shown beside its losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from cloze.launch.config import PretrainConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.pretrain.data import TrainingData, check_alike, check_data, open_cache, open_split
from cloze.launch.pretrain.sample_predictions import SamplePredictions
from cloze.launch.run import runs
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.training.evaluation import ValidationSet
from cloze.launch.training.process import Process
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import evaluation_batches
from cloze.pipeline.shards.shards import ShardReader
from cloze.pipeline.stores.places import to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def validation_sets(config: PretrainConfig, data: TrainingData, process: Process) -> list[ValidationSet]:
    """The validation sets: of the run's data, and `evaluation.sets`; empty if no document was held out. Collective.

    Raises:
        UserError: a set has another tokenizer, a field needs a validation split that is empty, or a masking rate is
        given although all shards hold their masks.
    """
    folders = [(name, manifest, True) for name, manifest in zip(data.names or (None,), data.manifests, strict=True)]
    for name, path in config.evaluation.sets.items():
        folders.append((name, check_data(to_place(path), config.model, config.train.sequence_length)[0], False))
        check_alike([data.manifest], folders[-1][1], "evaluation.sets")
    folders = [each for each in folders if each[1].splits["validation"].counts.get("samples")]
    if not folders:
        for name in ("keep_best", "patience", "target"):
            if getattr(config.evaluation, name):
                raise UserError(
                    f"evaluation.{name}: found {getattr(config.evaluation, name)}, expected none: the "
                    f"validation split of {data.manifest.folder} is empty; prepare the data with one"
                )
        process.console.warn(f"{data.manifest.folder}: the validation split is empty; nothing is evaluated")
    rate = config.evaluation.masking_rate
    if rate is not None and folders and all(manifest.mask_sets for _, manifest, _ in folders):
        raise UserError(
            f"evaluation.masking_rate: found {rate} with shards in {folders[0][1].folder} that hold their "
            "masks, expected null; or prepare them with --masking.mode dynamic"
        )
    environment = process.environment
    pooled = any(own for *_, own in folders)  # only the additional sets, if the data has no validation split
    return [
        ValidationSet(
            name,
            own or not pooled,
            partial(
                evaluation_batches,
                open_split(config, manifest.folder, "validation", environment, process.device),
                micro_batch_size=config.train.micro_batch,
                rank=environment.rank,
                world_size=environment.world_size,
                max_samples=config.evaluation.samples,
                segments=config.model.segments,
                rate=rate,
            ),
        )
        for name, manifest, own in folders
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
