"""Shards in a store, and their batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.shards import shard_file
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.stores.places import to_place

BLOCK_TOKENS = shard_file.BLOCK_TOKENS


def uploaded(folder: Path, bucket: str) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            (to_place(bucket) / "data" / str(path.relative_to(folder))).write(path)
    return f"{bucket}/data"


def stream(folder, cache=None, consumed=0, rank=0, world_size=1, batches=60):
    made = BatchStream(
        ShardReader(folder, cache=cache),
        global_batch_size=32,
        micro_batch_size=8,
        rank=rank,
        world_size=world_size,
        streams=4,
        seed=1,
        samples_consumed=consumed,
    )
    try:
        return [next(made) for _ in range(batches)]
    finally:
        made.close()


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.indices, other.indices) and one.num_masked == other.num_masked
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
