"""Data whose blocks, reads and periods are small, so that a small corpus has many of each."""

import pytest

from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading import batches, mixture
from cloze.pipeline.shards import shard_file
from tests.pipeline import corpus


@pytest.fixture(scope="module")
def small_units():
    """Small data has many blocks, is read in many parts, and a mixture's period is short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "BLOCK_TOKENS", 256)
        patch.setattr(batches, "_TOKENS_READ", 2048)
        patch.setattr(batches, "_TOKENS_OF_STREAM", 64)
        patch.setattr(batches, "_TOKENS_COLLATED", 4096)
        patch.setattr(mixture, "PERIOD", 1 << 10)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    corpus.write_jsonl(folder / "in" / "a.jsonl", corpus.documents(80))
    return folder


@pytest.fixture(scope="module")
def data(folder):
    prepare(corpus.config(folder, [folder / "in"]))
    return folder / "data"
