"""A prepared folder of several shards, compressed and not."""

import pytest

from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus


@pytest.fixture(scope="package", params=["zstd", "none"])
def data(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    path = corpus.write_jsonl(folder / "in" / "a.jsonl", corpus.documents(300))
    shards = corpus.ShardsConfig(target_tokens=16384, compression=request.param)
    prepare(corpus.config(folder, [path], shards=shards))
    return folder / "data"
