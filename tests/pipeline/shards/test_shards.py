"""Shards: what is written is read, in every tool, and no more than is wanted; what is damaged is named."""

import dataclasses
import hashlib
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading.batches import SampleStreams
from cloze.pipeline.records import BASE_COLUMNS, mask_columns
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
    whole._open.clear()
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


@pytest.mark.parametrize("near", [0, 1000])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_a_shorter_or_missing_shard_is_found_at_once(data, monkeypatch, damage, place, near):
    """Whether it is among the first, by which it is decided, or among the others, asked for in turn or at once."""
    monkeypatch.setattr(shards, "_ASKED_FIRST", 1)
    monkeypatch.setattr(shards, "_NEAR_SECONDS", near)
    names = Manifest.load(data).splits["train"].shards.file
    path = data / names[place]
    assert len(names) > 1
    intact = path.read_bytes()
    try:
        if damage == "shorter":
            path.write_bytes(intact[:-1])
        else:
            path.unlink()
        with pytest.raises(UserError, match=path.name):
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
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 1000)
    path = corpus.write_jsonl(tmp_path / "in" / "a.jsonl", corpus.documents(60))
    prepare(corpus.config(tmp_path, [path], shards=corpus.ShardsConfig(target_tokens=16384)))
    reader = ShardReader(tmp_path / "data")
    found = [pa.ipc.open_file(str(tmp_path / "data" / shard.file)) for shard in reader.shards]
    sizes = [file.get_batch(number).num_rows for file in found for number in range(file.num_record_batches)]
    assert sizes == reader.block_sizes.tolist() and len(sizes) > 10
    samples, _ = reader.take(np.arange(reader.num_samples))
    tokens = np.diff(samples.offsets[reader.block_starts])
    assert tokens.max() < 1300 and np.sort(tokens)[len(found)] > 600  # but the last of each shard


def test_a_folder_of_format_1_is_still_read(data, tmp_path):
    """Made from one of format 2 by what docs/data-format.md says of the difference."""
    made = shutil.copytree(data, tmp_path / "data")
    content = corpus.as_format_1(made) | {"sha256": ""}
    content["sha256"] = hashlib.sha256(corpus.manifest_text(content).encode()).hexdigest()
    (made / "manifest.json").write_text(corpus.manifest_text(content))
    old, new = ShardReader(made), ShardReader(data)
    assert old.manifest.to_json() == (made / "manifest.json").read_text(encoding="utf-8")
    assert old.manifest.format_version == 1 and old.block_sizes.max() > new.block_sizes.max() / 2
    indices = np.random.default_rng(0).permutation(new.num_samples)[:300]
    for mask_set in (0, 2):
        (found, masks), (expected, expected_masks) = old.take(indices, mask_set), new.take(indices, mask_set)
        assert corpus.rows(found) == corpus.rows(expected) and not found.source.any()
        assert np.array_equal(found.document, expected.document)
        assert np.array_equal(masks.positions, expected_masks.positions)
        assert np.array_equal(masks.ids, expected_masks.ids)
    samples = SampleStreams(old, 8, seed=1).read(range(8), 0, old.num_samples // 8).indices
    assert len(np.unique(samples)) == len(samples)


def test_one_process_may_ask_for_the_sizes_of_all_shards(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shard = Manifest.load(data).splits["train"].shards[1]
    (tmp_path / "data" / shard.file).unlink()
    with pytest.raises(UserError, match="shard-00001.*found no such shard"):
        ShardReader(tmp_path / "data")
    reader = ShardReader(tmp_path / "data", check_sizes=False)
    with pytest.raises(UserError, match="shard-00001"):
        reader.window(np.arange(len(reader.block_sizes)))


def test_the_manifest_survives_a_round_trip(data):
    manifest = Manifest.load(data)
    assert manifest.to_json() == (data / "manifest.json").read_text(encoding="utf-8")
    assert manifest.hash == hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()


_NAMES = st.text(st.sampled_from('a"\\\n},{ []:é\u2028'), max_size=6)
_SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _NAMES
_ROWS = st.lists(st.dictionaries(_NAMES, _SIMPLE, max_size=3), max_size=3)
_JSON = st.recursive(
    _SIMPLE | st.lists(_SIMPLE, max_size=3) | _ROWS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(preparation=st.dictionaries(_NAMES, _JSON, max_size=3), sources=_ROWS)
def test_a_manifest_is_written_as_python_writes_indented_json(data, preparation, sources):
    manifest = dataclasses.replace(Manifest.load(data), preparation=preparation, sources=sources)
    assert manifest.to_json() == json.dumps(json.loads(manifest.to_json()), indent=1, ensure_ascii=False) + "\n"
    assert json.loads(manifest.to_json())["preparation"] == preparation
