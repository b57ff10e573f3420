"""The readers of a run's folders, and the cache of those that are in a store (tests/stores reads through it)."""

from dataclasses import replace

import pytest
import torch

from cloze.launch.commands import parse
from cloze.launch.config import DataSource, MixtureConfig
from cloze.launch.config.sections import DataCacheConfig
from cloze.launch.pretrain.data import TrainingData, open_data
from cloze.launch.pretrain.readers import cache_facts, open_cache, open_split, open_training
from cloze.launch.system import distributed
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.streams import Mixture
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.stores.places import to_place
from tests.launching import pretrain_arguments
from tests.synthetic import make_shards

WHERE = (Environment(), torch.device("cpu"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers")
    for seed, name in enumerate(("wiki", "web")):
        make_shards(folder / name, seed=seed)
    return folder


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(distributed, "reduce_sum", lambda values: values)  # of one process


def run_of(folder, **sections):
    return replace(parse("pretrain", pretrain_arguments(folder / "wiki", folder / "run")[1:]), **sections)


def test_a_mixture_has_a_reader_for_each_source(folders, alone):
    config = run_of(folders)
    assert type(open_training(config, open_data(config)[0], *WHERE)) is ShardReader
    sources = [DataSource(str(folders / "wiki"), weight=3), DataSource(str(folders / "web"), weight=1)]
    mixed = run_of(folders, data=MixtureConfig(sources))
    assert type(open_training(mixed, open_data(mixed)[0], *WHERE)) is Mixture


def test_a_missing_shard_is_one_line(tmp_path, alone):
    make_shards(tmp_path / "wiki")
    shard = next((tmp_path / "wiki").rglob("train/*.arrow"))
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}"):
        open_split(run_of(tmp_path), tmp_path / "wiki", "train", *WHERE)


def test_only_data_in_a_store_have_a_cache(folders, tmp_path, monkeypatch):
    """In the home folder, or where the run says; `~` is the home folder there too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    stored = to_place("s3://bucket/data")
    assert open_cache(run_of(folders), folders / "wiki") is None
    assert open_cache(run_of(folders), stored).folder == tmp_path / ".cache/cloze/data"
    given = run_of(folders, data_cache=DataCacheConfig(folder="~/mine", gigabytes=2.5))
    cache = open_cache(given, stored)
    assert (cache.folder, cache.limit_bytes) == (tmp_path / "mine", 2_500_000_000)
    local = open_data(given)[0]
    assert cache_facts(given, local) == []
    there = TrainingData((), (replace(Manifest.load(folders / "wiki"), folder=stored),), local.phases)
    assert cache_facts(given, there) == [("data cache", f"{tmp_path}/mine, up to 2.5 GB")]
