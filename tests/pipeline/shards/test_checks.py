"""Shards that were made to harm, with right checksums and hashes: one line each, before anything uses their buffers."""

import re

import numpy as np
import pyarrow as pa
import pytest

from cloze.pipeline.config import VerifyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import verifying
from cloze.pipeline.jobs.verifying import verify
from cloze.pipeline.shards import checks, shard_file
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.storage import sha256_of
from tests.pipeline import corpus
from tests.synthetic import make_shards


def crafted(folder, monkeypatch, change):
    """A prepared folder whose first block is changed before its checksums, index and hashes are made."""
    make, blocks = shard_file._record_batch, []

    def changed(*arguments):
        batch, sums = make(*arguments)
        blocks.append(batch)
        if len(blocks) > 1:
            return batch, sums
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns |= change(columns)
        batch = pa.RecordBatch.from_arrays([columns[name] for name in batch.schema.names], schema=batch.schema)
        base = [name for name in batch.schema.names if not name.startswith("masked_")]
        sums = {f"{shard_file._CHECKSUM}.base": str(shard_file._checksum(batch.column(name) for name in base))}
        for number in range((len(batch.schema.names) - len(base)) // 2):
            pair = [batch.column(name) for name in shard_file.mask_columns(number)]
            sums[f"{shard_file._CHECKSUM}.{number}"] = str(shard_file._checksum(pair))
        return batch, sums

    monkeypatch.setattr(shard_file, "_record_batch", changed)
    return make_shards(folder)


def with_offsets(column: pa.Array, change) -> pa.Array:
    offsets = column.offsets.to_numpy().copy()
    change(offsets)
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(column.type, len(column), buffers, children=[column.values])


def with_values(column: pa.Array, place: int, value: int) -> pa.Array:
    values = column.values.to_numpy().copy()
    values[place] = value
    return pa.Array.from_buffers(
        column.type, len(column), [None, column.buffers()[1]], children=[pa.array(values, column.values.type)]
    )


def without_nulls(column: pa.Array, value: int) -> pa.Array:
    """All bits say that there is a value, and the number says that there is none."""
    values = np.full(len(column), value, np.int8)
    bits = np.full(len(column) // 8 + 1, 255, np.uint8)
    buffers = [pa.py_buffer(bits), pa.py_buffer(values)]
    return pa.Array.from_buffers(column.type, len(column), buffers, null_count=len(column))


def put(offsets: np.ndarray, place: int, value: int) -> None:
    offsets[place] = value


CRAFTED = {
    "offsets that descend": (
        lambda c: {"input_ids": with_offsets(c["input_ids"], lambda o: put(o, 2, o[4]))},
        "input_ids: found offsets that do not ascend",
    ),
    "ids beyond the vocabulary": (
        lambda c: {"input_ids": with_values(c["input_ids"], 3, 60_000)},
        "input_ids: found the id 60000, expected ids below the vocabulary's size",
    ),
    "a position outside": (
        lambda c: {"masked_positions_1": with_values(c["masked_positions_1"], 0, 999)},
        "masked_positions_1: found a masked position outside of its sample",
    ),
    "masked ids beyond the vocabulary": (
        lambda c: {"masked_ids_0": with_values(c["masked_ids_0"], 1, 65_535)},
        "masked_ids_0: found the id 65535, expected ids below",
    ),
    "labels by another number of nulls than their bits": (
        lambda c: {"next_sentence_label": without_nulls(c["next_sentence_label"], 77)},
        "nulls, expected 0, as its bits say",
    ),
    "other numbers of ids": (
        lambda c: {"masked_ids_0": with_offsets(c["masked_ids_0"], lambda o: put(o, 1, o[1] + 1))},
        "masked_ids_0: found other numbers of masked ids",
    ),
    "a second segment beyond the end": (
        lambda c: {"segment_b_start": pa.array([65535] + c["segment_b_start"].to_pylist()[1:], pa.uint16())},
        "segment_b_start: found 65535 in a sample of",
    ),
    "a label that is none": (
        lambda c: {"next_sentence_label": pa.array([77] + c["next_sentence_label"].to_pylist()[1:], pa.int8())},
        "next_sentence_label: found 0 to 77, expected 0, 1 or null",
    ),
}


@pytest.mark.parametrize("name", ["input_ids", "masked_ids_0"])
def test_a_null_among_the_ids_is_damage(tmp_path, monkeypatch, name):
    """It would be read as the id below it, with every hash right."""

    def change(columns):
        column = columns[name]
        values = pa.array([None, *column.values.to_pylist()[1:]], column.values.type)
        return {name: pa.ListArray.from_arrays(column.offsets, values, type=column.type)}

    folder = crafted(tmp_path / "data", monkeypatch, change)
    with pytest.raises(UserError, match="block 0 has another checksum"):
        ShardReader(folder, "train").take(np.arange(20), 0)


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_block_is_refused_in_one_line(tmp_path, monkeypatch, name):
    """When it is read, and by `cloze verify`, though every hash is right."""
    change, expected = CRAFTED[name]
    folder = crafted(tmp_path / "data", monkeypatch, change)
    reader = ShardReader(folder, "train")
    with pytest.raises(UserError, match=f"shard-00000.arrow: damaged shard: block 0.*(?:{expected})"):
        for mask_set in range(reader.manifest.mask_sets):
            reader.take(np.arange(reader.num_samples), mask_set)
    for check in ("_check_manifest", "_check_tokenizer"):  # of a corpus, which these numbers are not of
        monkeypatch.setattr(verifying, check, lambda manifest: [])
    damaged = verify(VerifyConfig(str(folder)))[1]
    assert any(re.search(expected, line) for line in damaged) and not any("\n" in line for line in damaged), damaged


def test_lengths_of_buffers_that_no_file_has_are_one_line(tmp_path):
    """A negative one was a SystemError of numpy's: checksums were computed of views before lengths were checked."""
    folder = make_shards(tmp_path / "data", validation=2)
    whole = ShardReader(folder, "train").take(np.arange(20), 0)[0].input_ids
    path = folder / "train" / "shard-00000.arrow"
    content = path.read_bytes()
    block = 16 + int.from_bytes(content[12:16], "little")  # behind the magic and the message of the schema
    size = int.from_bytes(content[block + 4 : block + 8], "little")
    refused = 0
    ends = range(block + 15, block + 8 + size, 8)  # the last byte of each number of 64 bits in its metadata
    for end, changes in ((end, changes) for end in ends for changes in ({0: 128}, {0: 127, -1: 255})):
        changed = bytearray(content)
        for place, bits in changes.items():
            changed[end + place] |= bits
        path.write_bytes(changed)
        try:
            assert np.array_equal(ShardReader(folder, "train").take(np.arange(20), 0)[0].input_ids, whole)
        except UserError as error:
            assert "shard-00000.arrow" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 5


def of_type(column: pa.Array, kind: pa.DataType, value: object) -> pa.Array:
    """A column of other items, the first of which is `value`."""
    if not pa.types.is_list(column.type):
        return pa.array([value, *column.to_pylist()[1:]], kind)
    return pa.ListArray.from_arrays(column.offsets, pa.array([value, *column.values.to_pylist()[1:]], kind))


OF_OTHER_TYPES = {
    "a negative id": ("input_ids", pa.int16(), -5),
    "ids that are no numbers": ("input_ids", pa.float64(), float("nan")),
    "a negative position": ("masked_positions_0", pa.int16(), -3),
    "a negative masked id": ("masked_ids_0", pa.int16(), -5),
    "a negative second segment": ("segment_b_start", pa.int16(), -7),
    "half a label": ("next_sentence_label", pa.float64(), 0.5),
    "second segments that are lists": ("segment_b_start", pa.list_(pa.int16()), [1]),
}


@pytest.mark.parametrize("name", OF_OTHER_TYPES)
def test_columns_of_other_types_are_refused_in_format_1(tmp_path, name):
    """Its files were read by the schema that they say they have."""
    folder = make_shards(tmp_path / "data")
    content = corpus.as_format_1(folder)
    shard = content["splits"]["train"]["shards"][0]
    path, (column, kind, value) = folder / shard["file"], OF_OTHER_TYPES[name]
    (batch,) = pa.ipc.open_file(path.read_bytes()).read_all().to_batches()
    columns = {each: batch.column(each) for each in batch.schema.names}
    if pa.types.is_list(kind):
        columns[column] = pa.array([value] * len(batch), kind)
    else:
        columns[column] = of_type(columns[column], kind, value)
    made = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
    groups = {"base": shard_file.BASE_COLUMNS[:-1]}
    groups |= {str(number): shard_file.mask_columns(number) for number in range(content["mask_sets"])}
    sums = {
        f"{shard_file._CHECKSUM}.{group}": str(shard_file._checksum(map(made.column, names)))
        for group, names in groups.items()
        if not pa.types.is_list(kind) or column not in names
    }
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, made.schema) as writer:
        writer.write_batch(made, custom_metadata={f"{shard_file._CHECKSUM}.base": "0"} | sums)
    shard |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    del content["sha256"]  # which manifests of format 1 had not
    (folder / "manifest.json").write_text(corpus.manifest_text(content))
    (line,) = ShardReader(folder, "train").faults()
    assert "shard-00000.arrow: damaged shard" in line and "\n" not in line


def test_what_a_block_of_format_1_unpacks_to_is_bounded(tmp_path):
    """A file of some KB took gigabytes before it was refused."""
    folder = make_shards(tmp_path / "data", mask_sets=0)
    content = corpus.as_format_1(folder)
    shard = content["splits"]["train"]["shards"][0]
    path = folder / shard["file"]
    (batch,) = pa.ipc.open_file(path.read_bytes()).read_all().to_batches()
    many = pa.array(np.zeros(50_000_000, np.uint16))
    offsets = np.full(len(batch) + 1, len(many), np.int32) * (np.arange(len(batch) + 1) > 0)
    columns = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), many), *batch.columns[1:]]
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
    shard |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    del content["sha256"]  # which manifests of format 1 had not
    (folder / "manifest.json").write_text(corpus.manifest_text(content))
    del many, columns
    (line,) = ShardReader(folder, "train").faults()
    assert path.stat().st_size < 100_000 and "it would have 100,0" in line


def test_good_blocks_of_every_kind_pass(tmp_path):
    for number, options in enumerate(({}, {"pairs": False}, {"mask_sets": 0}, {"max_length": 8})):
        folder = make_shards(tmp_path / str(number), train=50, validation=2, **options)
        assert list(ShardReader(folder, "train").faults()) == []


def test_offsets_outside_of_the_values_are_refused_before_they_are_used():
    """What Arrow's own functions would not build, but a file can hold."""
    whole = pa.array([[5, 6], [7]], pa.list_(pa.uint16()))
    for offsets in ([0, 2, 1 << 30], [0, -5, 3], [-1, 2, 3]):
        values = pa.array([5, 6, 7], pa.uint16())
        fault = checks._offsets_fault("input_ids", np.array(offsets, np.int32), len(values))
        assert fault == "input_ids: found offsets that do not ascend from 0 to 3, the number of its values"
    assert checks._offsets_fault("input_ids", whole.offsets.to_numpy(), 3) is None
