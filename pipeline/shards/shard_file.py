"""One shard: an Arrow IPC file of samples; written atomically, read by blocks, and only the columns in use."""

import base64
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa

from cloze.pipeline import ragged
from cloze.pipeline.records import (
    BASE_COLUMNS,
    NEXT_SENTENCE_LABEL,
    NO_LABEL,
    Masks,
    Samples,
    mask_columns,
    numpy_type,
    shard_schema,
    token_type,
)
from cloze.pipeline.shards.manifest import FORMAT_VERSION, ShardInfo
from cloze.pipeline.storage import publishing, sha256_of
from cloze.pipeline.stores.cache import CachedFile
from cloze.pipeline.stores.places import Place

# Of a block, about: some 200 KB to read with one mask set, and 1,024 of them, one for each stream of a large run, fit
# into 350 MB of memory.
BLOCK_TOKENS = 1 << 17
_SAMPLES_PER_BLOCK_1 = 4096  # in format 1
_CHECKSUM = "crc32"  # metadata key of the checksum of a record batch's decoded columns
_INDEX = "cloze.byte_ranges"  # key in the metadata of a shard's footer
_UNWRITTEN = b"~"  # not a base64 character
_BUFFERS_OF_LIST, _BUFFERS_OF_NUMBER = 4, 2  # number of buffers of a column in Arrow's layout: list<number>, number
_FOOTER_GUESS = 1 << 14  # bytes at the end of a stored shard that usually contain its footer
_AROUND_FOOTER = 32  # more than the size of Arrow's magic at both ends and the footer's length
_SIZE = struct.Struct("<q")  # that a compressed buffer begins with
# Errors of reading a damaged shard.
BAD = (
    pa.ArrowException,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    struct.error,
    OverflowError,
    MemoryError,
)


def samples_per_block(samples: np.ndarray, tokens: np.ndarray, version: int = FORMAT_VERSION) -> np.ndarray:
    """Samples per block of each shard (except its last block), from the shards' entries in the manifest: int64
    (shards,).

    The blocks of a shard have about the same number of tokens, at most about BLOCK_TOKENS; in format 1 4,096 samples.
    """
    if version == 1:
        return np.full(len(samples), _SAMPLES_PER_BLOCK_1)
    blocks = np.minimum(np.maximum(samples, 1), -(-tokens // BLOCK_TOKENS))
    return np.maximum(1, -(-samples // np.maximum(1, blocks)))


def write_shard(
    path: Place,
    samples: Samples,
    masks: list[Masks],
    vocab_size: int,
    pair_set: int,
    compression: str,
    check: Callable[[], object] = lambda: None,
) -> ShardInfo:
    """Write one shard atomically.

    Args:
        compression: "zstd" or "none".
        check: called when it is made, before it gets its name.

    Returns:
        Its entry for the manifest.
    """
    schema = shard_schema(vocab_size, len(masks))
    options = pa.ipc.IpcWriteOptions(
        compression=None if compression == "none" else compression,
        use_threads=False,  # a worker uses one core
    )
    (rows,) = samples_per_block(np.array([len(samples)]), np.array([len(samples.input_ids)])).tolist()
    starts = range(0, len(samples), rows)
    room = _UNWRITTEN * len(_encoded(np.zeros((len(starts), len(masks) + 2))))
    with publishing(path) as aside:
        ends = []
        with (
            pa.OSFile(str(aside), "wb") as sink,
            pa.ipc.new_file(sink, schema, options=options, metadata={_INDEX: room}) as writer,
        ):
            for start in starts:
                stop = min(start + rows, len(samples))
                batch, checksums = _record_batch(schema, samples, masks, vocab_size, start, stop)
                writer.write_batch(batch, custom_metadata=checksums)
                ends.append(sink.tell())
        _fill_in_index(aside, schema, ends, room)
        size, digest = aside.stat().st_size, sha256_of(aside)
        check()
    return ShardInfo(
        file=f"{path.parent.name}/{path.name}",
        pair_set=pair_set,
        samples=len(samples),
        tokens=len(samples.input_ids),
        bytes=size,
        sha256=digest,
    )


def _encoded(bounds: np.ndarray) -> bytes:
    return base64.b64encode(bounds.astype("<i8").tobytes())


def _fill_in_index(path: Path, schema: pa.Schema, ends: list[int], room: bytes) -> None:
    """Write the index of the blocks' columns into the space reserved for it in the footer.

    One row per block: its start, the end of the columns that every reader needs, and the end of each mask set's
    columns.
    """
    if not ends:
        return
    with open(path, "r+b") as file:
        # Arrow's magic, padded to 8 bytes, and the schema precede the blocks.
        starts = [8 + schema.serialize().size, *ends[:-1]]
        bounds = [_column_ends(file, start, end) for start, end in zip(starts, ends, strict=True)]
        file.seek(ends[-1])
        file.seek(ends[-1] + file.read().index(room))
        file.write(_encoded(np.array(bounds)))


def _column_ends(file: IO[bytes], start: int, end: int) -> list[int]:
    """The index row of the block at [start, end)."""
    file.seek(start)
    _, length = struct.unpack("<II", file.read(8))  # marker of a non-legacy message
    places = _buffers(file.read(length)).table[:, 0] + start + 8 + length
    base = _BUFFERS_OF_LIST + _BUFFERS_OF_NUMBER * (len(BASE_COLUMNS) - 1)
    return [start, *places[base :: 2 * _BUFFERS_OF_LIST].tolist(), end]


class _Buffers(NamedTuple):
    """Where the buffers of a block are, by its metadata: a flatbuffer (Arrow's Message.fbs and Schema.fbs)."""

    table: np.ndarray
    """(N, 2) place behind the metadata, and size."""
    packed: bool
    """Whether they are compressed."""
    size: int
    """Bytes behind the metadata."""


def _buffers(content: bytes | memoryview) -> _Buffers:
    """Raises struct.error or ValueError for what is no metadata of a block."""

    def read(form: str, place: int) -> int:
        return struct.unpack_from("<" + form, content, place)[0]

    def field(table: int, number: int) -> int:
        """Position of a field of a flatbuffer table, from its vtable."""
        return table + read("H", table - read("i", table) + 4 + 2 * number)

    message = read("I", 0)
    record_batch = field(message, 2)
    record_batch += read("I", record_batch)
    buffers = field(record_batch, 2)
    buffers += read("I", buffers)
    count = read("I", buffers)
    vtable = record_batch - read("i", record_batch)  # short, or with 0, where the last field is not there
    packed = 4 + 2 * 3 < read("H", vtable) and field(record_batch, 3) != record_batch
    table = np.frombuffer(content, "<i8", 2 * count, buffers + 4).reshape(-1, 2)
    return _Buffers(table, packed, read("q", field(message, 3)))


def _blocks_of_format_1(file: pa.OSFile | CachedFile, size: int, mask_sets: int) -> np.ndarray:
    """The index of a shard of format 1, which has none, from the metadata of its blocks; all columns of a block are
    read together.

    Args:
        size: bytes of the file.
    """
    rows: list[list[int]] = []
    place = 8  # behind Arrow's magic, padded
    place += 8 + struct.unpack("<II", os.pread(file.fileno(), 8, place))[1]  # and the schema
    while True:
        _, length = struct.unpack("<II", os.pread(file.fileno(), 8, place))
        if length == 0:  # the end of the blocks
            return np.array(rows, np.int64).reshape(-1, mask_sets + 2)
        if length > size:
            raise ValueError("its metadata are longer than the file")
        body = _buffers(os.pread(file.fileno(), length, place + 8)).size
        end = place + 8 + length + body
        if body < 0 or end > size:
            raise ValueError("the file ends before it")
        rows.append([place, *[end] * (mask_sets + 1)])
        place = end


def _check_unpacked(block: np.ndarray, columns: int, mask_set: int | None, most: int) -> None:
    """Raise ValueError for a block whose buffers are larger than its samples can be, before they are unpacked: each
    compressed one begins with its size.

    Args:
        block: (N,) uint8, from its marker on.
        columns: number of base columns.
    """
    base = _BUFFERS_OF_LIST + _BUFFERS_OF_NUMBER * (columns - 1)
    of_masks = 0 if mask_set is None else 2 * _BUFFERS_OF_LIST
    first, unpacked, data = base + of_masks * (mask_set or 0), 0, block.data
    (length,) = struct.unpack_from("<I", data, 4)
    buffers, packed, _ = _buffers(data[8 : 8 + length])
    read = [*buffers[:base].tolist(), *buffers[first : first + of_masks].tolist()] if packed else []
    for place, size in read:
        if size >= _SIZE.size:
            unpacked += max(0, _SIZE.unpack_from(data, 8 + length + place)[0])  # -1: as it is
    if unpacked > most:
        raise ValueError(f"it would have {unpacked:,} bytes, expected at most {most:,} of its samples")


def _record_batch(
    schema: pa.Schema, samples: Samples, masks: list[Masks], vocab_size: int, start: int, stop: int
) -> tuple[pa.RecordBatch, dict[str, str]]:
    token = token_type(vocab_size)
    labels = samples.next_sentence_label[start:stop]
    base = [
        _list_array(samples.input_ids, samples.offsets, start, stop, token),
        ragged.to_arrow(samples.segment_b_start[start:stop]),
        ragged.to_arrow(np.where(labels == NO_LABEL, 0, labels).astype(np.int8), labels != NO_LABEL),
        ragged.to_arrow(samples.document[start:stop]),
        ragged.to_arrow(samples.source[start:stop]),
    ]
    columns, checksums = list(base), {f"{_CHECKSUM}.base": str(_checksum(base))}
    for number, mask in enumerate(masks):
        pair = [
            _list_array(mask.positions, mask.offsets, start, stop, pa.uint16()),
            _list_array(mask.ids, mask.offsets, start, stop, token),
        ]
        columns += pair
        checksums[f"{_CHECKSUM}.{number}"] = str(_checksum(pair))
    return pa.record_batch(columns, schema=schema), checksums


def _list_array(
    values: np.ndarray, offsets: np.ndarray, start: int, stop: int, value_type: pa.DataType
) -> pa.ListArray:
    low, high = offsets[start], offsets[stop]
    local = (offsets[start : stop + 1] - low).astype(np.int32)
    items = values[low:high].astype(numpy_type(value_type), copy=False)
    return pa.ListArray.from_arrays(ragged.to_arrow(local), ragged.to_arrow(items))


def _checksum(columns: Iterable[pa.Array]) -> int:
    """CRC-32 over the columns' values: list offsets (int32), then list items; nulls count as 0."""
    crc = 0
    for column in columns:
        if pa.types.is_list(column.type):
            crc = zlib.crc32(ragged.from_arrow(column.offsets).data, crc)
            column = column.values
        crc = zlib.crc32(ragged.from_arrow(column, null=0).data, crc)
    return crc


def is_intact(
    batch: pa.RecordBatch, metadata: pa.KeyValueMetadata, columns: Sequence[str], mask_set: int | None
) -> bool:
    """Whether a block's base columns and those of its mask set have the checksums of when they were written, and null
    stands for next-sentence labels alone.
    """
    groups = [("base", columns)] + ([] if mask_set is None else [(str(mask_set), mask_columns(mask_set))])
    return all(
        int(metadata[f"{_CHECKSUM}.{name}"]) == _checksum(map(batch.column, of_group))
        and not any(_nulls(batch.column(each)) for each in of_group if each != NEXT_SENTENCE_LABEL)
        for name, of_group in groups
    )


def _nulls(column: pa.Array) -> int:
    """Of its rows, and of the items in them."""
    return int(column.null_count) + (column.values.null_count if isinstance(column, pa.ListArray) else 0)


class Shard:
    """An open shard. Of a block two ranges are read: its base columns with the metadata before them, and those of the
    mask set; of a shard in a store only these are fetched. In format 1 a block is read, and a shard fetched, as a
    whole.

    Args:
        schema: as the manifest says: that of the file isn't believed.
    """

    def __init__(self, file: pa.OSFile | CachedFile, schema: pa.Schema, mask_sets: int, version: int):
        self._file = file
        self._columns = len(schema) - 2 * mask_sets
        # the message that comes first in a stream of record batches
        self._head = np.frombuffer(schema.serialize(), np.uint8)
        self._stored = isinstance(file, CachedFile)
        self._is_format_1 = version == 1
        size = file.size if isinstance(file, CachedFile) else file.size()
        if version == 1:
            if isinstance(file, CachedFile):
                file.need([(0, size)])
            self._bounds = _blocks_of_format_1(file, size, mask_sets)
        else:
            end = _footer(file) if isinstance(file, CachedFile) else file
            encoded = pa.ipc.open_file(end).metadata[_INDEX.encode()]
            self._bounds = np.frombuffer(base64.b64decode(encoded, validate=True), "<i8").reshape(-1, mask_sets + 2)
        steps = np.diff(self._bounds.ravel(), prepend=0, append=size)
        if (steps < 0).any():
            raise ValueError("its index of byte ranges isn't ascending")

    @property
    def removed(self) -> bool:
        """Whether the cache has removed the copy, whose space is freed when it is closed."""
        return self._stored and self._file.removed

    def _ranges(self, number: int, mask_set: int | None) -> list[tuple[int, int]]:
        """The byte ranges [start, stop) of a block that are read; none of one that a damaged index does not have."""
        if number >= len(self._bounds):
            return []
        bounds = self._bounds[number].tolist()
        return [(bounds[each], bounds[each + 1]) for each in ([0] if mask_set is None else [0, mask_set + 1])]

    def fetch(self, numbers: list[int], mask_set: int | None) -> None:
        """Fetch the bytes of blocks from the store."""
        self._file.need([each for number in numbers for each in self._ranges(number, mask_set)])

    def forget(self, number: int, mask_set: int | None) -> None:
        """Mark a block, and what its place was read from, as missing, so that they are fetched again: the footer, or in
        format 1 the heads of all blocks.
        """
        start = 0 if self._is_format_1 else max(0, self._file.size - _FOOTER_GUESS)
        self._file.forget([(start, self._file.size), *self._ranges(number, mask_set)])

    def read(
        self, number: int, fields: list[int], mask_set: int | None, most: int
    ) -> tuple[pa.RecordBatch, pa.KeyValueMetadata]:
        """A block with the columns of these numbers, and its metadata.

        Args:
            most: bytes that the columns can have.
        """
        first, end = self._bounds[number][[0, -1]].tolist()
        head = len(self._head)
        # Unused columns are never touched, so their memory is never allocated.
        content = np.empty(head + end - first, np.uint8)
        content[:head] = self._head
        if self._stored:
            self.fetch([number], mask_set)
        for low, high in self._ranges(number, mask_set):
            view = content.data[head + low - first : head + high - first]
            while view:
                count = os.preadv(self._file.fileno(), [view], high - len(view))
                if not count:
                    raise ValueError("the file ends before it")
                view = view[count:]
        _check_unpacked(content[head:], self._columns, mask_set, most)
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        stream = pa.ipc.open_stream(pa.py_buffer(content), options=options, memory_pool=ragged.POOL)
        try:
            return stream.read_next_batch_with_custom_metadata()
        except StopIteration:  # zeros are the end of a stream
            raise ValueError("it has no rows") from None


def _footer(file: CachedFile) -> pa.Buffer:
    """The end of a shard with its footer; the last ten bytes are the footer's length and Arrow's magic."""
    data = file.read(max(0, file.size - _FOOTER_GUESS), file.size)
    if (length := struct.unpack("<i", data[-10:-6])[0]) + _AROUND_FOOTER > len(data):
        data = file.read(max(0, file.size - length - _AROUND_FOOTER), file.size)
    return pa.py_buffer(data)
