"""What ShardReader finds of a split: rows in any order, of both formats; what is missing is named."""

import hashlib
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import SampleStreams
from cloze.pipeline.shards import reader as reading
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus


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

    monkeypatch.setattr(reading, "_OPEN_SHARDS", limit)
    monkeypatch.setattr(ShardReader, "_decode", counting)
    found, _ = ShardReader(data).window(blocks).take(np.arange(whole.num_samples))
    assert corpus.rows(found) == corpus.rows(expected)
    assert len(whole.shards) > limit and 0 < max(seen) <= limit


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_a_shorter_or_missing_shard_is_found_at_once(data, monkeypatch, damage, place, threads):
    monkeypatch.setattr(reading, "_ASKING", threads)
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
