"""Shards: what is written is read, in every tool; what is damaged is named."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards import shards
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.shards import ShardReader
from tests.pipeline import corpus


@pytest.fixture(scope="module", params=["zstd", "none"])
def data(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    path = corpus.write_jsonl(folder / "in" / "a.jsonl", corpus.documents(300))
    shards = corpus.ShardsConfig(target_tokens=16384, compression=request.param)
    prepare(corpus.config(folder, [path], shards=shards))
    return folder / "data"


def test_columns_of_any_row_in_any_order(data):
    reader = ShardReader(data)
    assert len(reader.shards) > 2
    tables = [pa.ipc.open_file(str(data / shard.file)).read_all() for shard in reader.shards]
    table = pa.concat_tables(tables)
    indices = np.random.default_rng(0).permutation(reader.num_samples)[:500]
    samples, masks = reader.take(indices, mask_set=2)
    assert corpus.rows(samples) == [table["input_ids"][int(i)].as_py() for i in indices]
    assert samples.segment_b_start.tolist() == [table["segment_b_start"][int(i)].as_py() for i in indices]
    assert samples.next_sentence_label.tolist() == [table["next_sentence_label"][int(i)].as_py() for i in indices]
    assert samples.document.tolist() == [table["document"][int(i)].as_py() for i in indices]
    low_high = list(zip(masks.offsets[:-1], masks.offsets[1:], strict=True))
    assert [masks.positions[a:b].tolist() for a, b in low_high] == [
        table["masked_positions_2"][int(i)].as_py() for i in indices
    ]
    assert [masks.ids[a:b].tolist() for a, b in low_high] == [table["masked_ids_2"][int(i)].as_py() for i in indices]


def test_a_window_of_many_shards_keeps_few_of_them_open(data, monkeypatch):
    whole = ShardReader(data)
    blocks = np.arange(len(whole.block_sizes))
    expected, _ = whole.window(blocks).take(np.arange(whole.num_samples))
    whole._readers.clear()
    limit, decode, seen = 2, ShardReader._decode, []

    def counting(*arguments):
        paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        seen.append(sum(path.startswith(str(data)) for path in paths))
        return decode(*arguments)

    monkeypatch.setattr(shards, "_OPEN_SHARDS", limit)
    monkeypatch.setattr(ShardReader, "_decode", counting)
    found, _ = ShardReader(data).window(blocks).take(np.arange(whole.num_samples))
    assert corpus.rows(found) == corpus.rows(expected)
    assert len(whole.shards) > limit and 0 < max(seen) <= limit


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


def test_a_flipped_bit_is_found_when_its_block_is_read(data):
    shard = Manifest.load(data).splits["train"].shards[1]
    path = data / shard.file
    intact = path.read_bytes()
    found = 0
    try:
        for place in np.linspace(2000, len(intact) - 3000, 25).astype(int):
            broken = bytearray(intact)
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


@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_a_shorter_or_missing_shard_is_found_at_once(data, damage):
    path = data / Manifest.load(data).splits["train"].shards[0].file
    intact = path.read_bytes()
    try:
        if damage == "shorter":
            path.write_bytes(intact[:-1])
        else:
            path.unlink()
        with pytest.raises(UserError, match="shard-00000"):
            ShardReader(data)
    finally:
        path.write_bytes(intact)


def test_errors_of_a_folder_that_is_none(tmp_path, data):
    with pytest.raises(UserError, match="cloze prepare"):
        ShardReader(tmp_path)
    with pytest.raises(UserError, match="mask sets"):
        ShardReader(data).take(np.array([0]), mask_set=3)
    content = json.loads((data / "manifest.json").read_text())
    content["format_version"] = 99
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="format_version 99"):
        ShardReader(tmp_path)


def test_the_manifest_survives_a_round_trip(data):
    manifest = Manifest.load(data)
    assert manifest.to_json() == (data / "manifest.json").read_text(encoding="utf-8")
    import hashlib

    assert manifest.hash == hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()
