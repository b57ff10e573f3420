"""The file of a shard: every tool opens it, no more of it is read than is wanted, and damage is found."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.records import BASE_COLUMNS, Masks, Samples, mask_columns, shard_schema
from cloze.pipeline.shards import shard_file
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus


def test_other_tools_open_them(data, tmp_path):
    polars = pytest.importorskip("polars")
    datasets = pytest.importorskip("datasets")
    manifest = Manifest.load(data)
    shard = manifest.splits["train"].shards[0]
    frame = polars.read_ipc(data / shard.file)
    assert frame.height == shard.samples and frame["input_ids"].list.len().sum() == shard.tokens
    loaded = datasets.load_dataset(
        "arrow", data_files=str(data / shard.file), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(loaded) == shard.samples and loaded[0]["input_ids"] == frame["input_ids"][0].to_list()


def test_a_flipped_bit_and_lost_bytes_are_found_when_their_block_is_read(data):
    shard = Manifest.load(data).splits["train"].shards[1]
    path = data / shard.file
    intact = path.read_bytes()
    found, zeros = 0, []
    try:
        for place in np.linspace(500, len(intact) - 3000, 25).astype(int):
            broken = bytearray(intact)
            if len(zeros) < 5:  # what a file system leaves of blocks that it has lost
                broken[place : place + 2000] = bytes(2000)
                zeros.append(place)
            else:
                broken[place] ^= 0x10
            path.write_bytes(broken)
            reader = ShardReader(data)
            for mask_set in range(3):
                try:
                    reader.window(np.arange(len(reader.block_sizes)), mask_set)
                except UserError as error:
                    assert shard.file in str(error) and "damaged" in str(error)
                    found += 1
                    break
    finally:
        path.write_bytes(intact)
    assert found >= 20  # the others hit padding


def test_only_the_columns_in_use_are_read(data, monkeypatch):
    """In two ranges a block, which the index in the footer names."""
    reader = ShardReader(data)
    blocks = np.arange(len(reader.block_sizes))
    ranges, read = [], os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, views, start: (ranges.append((start, start + len(views[0]))), read(file, views, start))[1],
    )
    reader.window(blocks, mask_set=2)
    assert len(ranges) == 2 * len(blocks)
    in_use = sum(high - low for low, high in ranges)
    columns = [*BASE_COLUMNS, *mask_columns(2)]
    files = [pa.ipc.open_file(str(data / shard.file)) for shard in reader.shards]
    if b"zstd" in json.dumps(reader.manifest.preparation["shards"]).encode():
        assert in_use < 0.75 * sum(shard.bytes for shard in reader.shards)
    else:  # then the columns' own bytes are known
        batches = [file.get_batch(number) for file in files for number in range(file.num_record_batches)]
        plain = sum(column.nbytes for batch in batches for column in map(batch.column, columns))
        assert plain < in_use < plain + 2500 * len(blocks)  # with the metadata of each block, and padding


def test_the_blocks_of_a_shard_have_about_as_many_tokens_each(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_TOKENS", 1000)
    path = corpus.write_jsonl(tmp_path / "in" / "a.jsonl", corpus.documents(60))
    prepare(corpus.config(tmp_path, [path], shards=corpus.ShardsConfig(target_tokens=16384)))
    reader = ShardReader(tmp_path / "data")
    found = [pa.ipc.open_file(str(tmp_path / "data" / shard.file)) for shard in reader.shards]
    sizes = [file.get_batch(number).num_rows for file in found for number in range(file.num_record_batches)]
    assert sizes == reader.block_sizes.tolist() and len(sizes) > 10
    samples, _ = reader.take(np.arange(reader.num_samples))
    tokens = np.diff(samples.offsets[reader.block_starts])
    assert tokens.max() < 1300 and np.sort(tokens)[len(found)] > 600  # but the last of each shard


@pytest.mark.parametrize("masks", [0, 2], ids=["base", "masks"])
def test_what_a_block_unpacks_to_is_bounded_by_its_samples(tmp_path, masks):
    """A file of 4 KB whose one sample has forty million tokens took a hundred megabytes before that was wrong."""
    count = 40_000_000 if masks == 0 else 60
    samples = Samples(
        np.zeros(count, np.uint16),
        np.array([0, count]),
        *(np.zeros(1, kind) for kind in (np.uint16, np.int8)),
        *(np.zeros(1, kind) for kind in (np.uint64, np.uint16)),
    )
    many = np.zeros(10_000_000, np.uint16)
    drawn = [Masks(many[:3], many[:3], np.array([0, 3])), Masks(many, many, np.array([0, len(many)]))][:masks]
    (tmp_path / "train").mkdir()
    info = shard_file.write_shard(tmp_path / "train/x.arrow", samples, drawn, 100, 0, "zstd")
    assert info.bytes < 50_000
    fields = [*range(len(BASE_COLUMNS))]

    def read(mask_set: int | None, most: int) -> pa.RecordBatch:
        shard = shard_file.Shard(pa.OSFile(str(tmp_path / info.file)), shard_schema(100, masks), masks, 2)
        added = [] if mask_set is None else [len(fields) + 2 * mask_set, len(fields) + 2 * mask_set + 1]
        return shard.read(0, fields + added, mask_set, most)[0]

    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="it would have [48]0,000,.* bytes, expected at most 10,000 of its samples"):
        read(masks - 1 if masks else None, 10_000)
    assert pa.total_allocated_bytes() - before < 1 << 20
    if masks:
        assert read(0, 10_000).num_rows == 1
    assert read(masks - 1 if masks else None, 1 << 30).num_rows == 1
