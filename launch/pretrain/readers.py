"""Readers of the data of a pretraining run, and this machine's cache of data that are in a store."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.data import TrainingData
from cloze.launch.run import runs
from cloze.launch.system import distributed
from cloze.launch.system.environment.folders import cache_folder
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.loading.streams import Mixture
from cloze.pipeline.shards.manifest import FILE_NAME
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.stores import shared
from cloze.pipeline.stores.cache import Cache
from cloze.pipeline.stores.places import Place, StorePath, to_place
from cloze.pipeline.tokenization.tokenizer import FETCHED


@contextmanager
def read_once(config: PretrainConfig, environment: Environment) -> Iterator[None]:
    """Context in which manifests and tokenizers are local: rank 0 has read them from the store and sent their hashes,
    and one process per machine has fetched them into `data_cache.folder`. Does nothing for local folders. Collective.

    Raises:
        UserError: the store can't be read, or returns other content to other processes.
    """
    folders = [
        to_place(path) for path in (*(source.path for source in config.sources), *config.evaluation.sets.values())
    ]
    stored = {folder: open_cache(config, folder) for folder in folders if isinstance(folder, StorePath)}
    objects = {
        folder / name: cache
        for folder, cache in stored.items()
        if cache is not None
        for name in (FILE_NAME, *(f"{runs.TOKENIZER}/{each}" for each in FETCHED))
    }
    if objects:
        text = distributed.text_from_main(
            lambda: json.dumps([shared.ask(path, cache) for path, cache in objects.items()]), environment
        )
        for (path, cache), digest in zip(objects.items(), json.loads(text), strict=True):
            shared.use_digest(path, cache, digest)
    try:
        yield
    finally:
        shared.reset()


def open_split(
    config: PretrainConfig, folder: Place, split: str, environment: Environment, device: torch.device
) -> ShardReader:
    """Reader of a split. Only rank 0 checks the sizes of all shards; a failure is raised on all ranks. Collective.

    Raises:
        UserError: a shard is missing or has another size.
    """
    with distributed.together("find the shards", folder, device):
        return ShardReader(folder, split, check_sizes=environment.is_main, cache=open_cache(config, folder))


def open_training(
    config: PretrainConfig, data: TrainingData, environment: Environment, device: torch.device
) -> ShardReader | Mixture:
    """Reader of the training samples. Collective.

    Raises:
        UserError: as `open_split`.
    """
    readers = [open_split(config, manifest.folder, "train", environment, device) for manifest in data.manifests]
    return Mixture(readers, data.phases) if data.names else readers[0]


def open_cache(config: PretrainConfig, folder: Place) -> Cache | None:
    """This machine's cache for data in a store; None if the folder is local.

    Raises:
        UserError: the cache's folder cannot be written.
    """
    if not isinstance(folder, StorePath):
        return None
    given = config.data_cache.folder
    place = cache_folder() / "data" if given is None else Path(os.path.expanduser(given))
    return Cache(place, int(config.data_cache.gigabytes * 1e9), "data_cache.folder")


def cache_facts(config: PretrainConfig, data: TrainingData) -> list[tuple[str, str]]:
    """Rows of the table printed at the start: local disk space that the caches may use."""
    caches = [cache for manifest in data.manifests if (cache := open_cache(config, manifest.folder))]
    return [("data cache", f"{cache.folder}, up to {cache.limit_bytes / 1e9:,.1f} GB") for cache in caches[:1]]
