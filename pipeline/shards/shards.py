"""Shards: Arrow IPC files of samples, written whole, read by blocks."""

import zlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.records import (
    BASE_COLUMNS,
    DOCUMENT,
    INPUT_IDS,
    NEXT_SENTENCE_LABEL,
    NO_LABEL,
    SAMPLES_PER_BLOCK,
    SEGMENT_B_START,
    Masks,
    Samples,
    mask_columns,
    shard_schema,
    token_type,
)
from cloze.pipeline.shards.manifest import Manifest, ShardInfo
from cloze.pipeline.storage import publishing, readable_errors, sha256_of

_CHECKSUM = "crc32"  # of the decoded columns; stands in each record batch's metadata, so that reading can check it
_DECODERS = 2  # threads that decompress blocks: more would take cores from the training process
_OPEN_SHARDS = 64  # at once: a process may open 1,024 files by default, on macOS 256, and training opens others


def write_shard(
    path: Path, samples: Samples, masks: list[Masks], vocab_size: int, pair_set: int, compression: str
) -> ShardInfo:
    """Write one shard: aside, fsync, rename. Returns what the manifest says about it.

    compression: "zstd" or "none" (only then reading is zero-copy).
    """
    schema = shard_schema(vocab_size, len(masks))
    options = pa.ipc.IpcWriteOptions(
        compression=None if compression == "none" else compression,
        use_threads=False,  # a worker is one core
    )
    with publishing(path) as aside:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
            for start in range(0, len(samples), SAMPLES_PER_BLOCK):
                stop = min(start + SAMPLES_PER_BLOCK, len(samples))
                batch, checksums = _record_batch(schema, samples, masks, vocab_size, start, stop)
                writer.write_batch(batch, custom_metadata=checksums)
        size, digest = aside.stat().st_size, sha256_of(aside)
    return ShardInfo(
        file=f"{path.parent.name}/{path.name}",
        pair_set=pair_set,
        samples=len(samples),
        tokens=len(samples.input_ids),
        bytes=size,
        sha256=digest,
    )


def _record_batch(schema, samples: Samples, masks: list[Masks], vocab_size: int, start: int, stop: int):
    token = token_type(vocab_size)
    labels = samples.next_sentence_label[start:stop]
    base = [
        _list_array(samples.input_ids, samples.offsets, start, stop, token),
        ragged.to_arrow(samples.segment_b_start[start:stop]),
        ragged.to_arrow(np.where(labels == NO_LABEL, 0, labels).astype(np.int8), labels != NO_LABEL),
        ragged.to_arrow(samples.document[start:stop]),
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


def _list_array(values: np.ndarray, offsets: np.ndarray, start: int, stop: int, value_type: pa.DataType):
    low, high = offsets[start], offsets[stop]
    local = (offsets[start : stop + 1] - low).astype(np.int32)
    items = values[low:high].astype(value_type.to_pandas_dtype(), copy=False)
    return pa.ListArray.from_arrays(ragged.to_arrow(local), ragged.to_arrow(items))


def _checksum(columns: Iterable[pa.Array]) -> int:
    """CRC-32 over the columns' values: list offsets (int32), then list items; nulls count as 0."""
    crc = 0
    for column in columns:
        if pa.types.is_list(column.type):
            crc = zlib.crc32(ragged.from_arrow(column.offsets), crc)
            column = column.values
        elif column.null_count:
            column = column.fill_null(0)
        crc = zlib.crc32(ragged.from_arrow(column), crc)
    return crc


@dataclass(frozen=True)
class Window:
    """Some blocks, decoded into flat arrays; rows of it are gathered without a Python step per sample."""

    samples: Samples
    masks: Masks | None

    def take(self, rows: np.ndarray) -> tuple[Samples, Masks | None]:
        """The rows (B,) of this window, in that order."""
        source = self.samples
        starts = source.offsets[rows]
        lengths = source.offsets[rows + 1] - starts
        samples = Samples(
            input_ids=ragged.gather(source.input_ids, starts, lengths),
            offsets=ragged.to_offsets(lengths),
            segment_b_start=source.segment_b_start[rows],
            next_sentence_label=source.next_sentence_label[rows],
            document=source.document[rows],
        )
        if self.masks is None:
            return samples, None
        starts = self.masks.offsets[rows]
        lengths = self.masks.offsets[rows + 1] - starts
        indices = ragged.ranges(starts, lengths)
        masks = Masks(self.masks.positions[indices], self.masks.ids[indices], ragged.to_offsets(lengths))
        return samples, masks


class ShardReader:
    """Reads one split of a prepared folder by blocks (record batches of up to 4,096 samples).

    Raises UserError if the folder holds no manifest, a shard is missing or has another size (at once), or a
    block is damaged (when it is read: each carries a checksum).

    num_samples: samples of the split, over all pair sets. epoch_sizes: samples of each pair set, through which
    epochs cycle. block_sizes (num_blocks,): samples of each block.
    """

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder = Path(folder)
        self.split = split
        self.manifest = Manifest.load(folder)
        if split not in self.manifest.splits:
            raise UserError(f"{folder}: found no split {split!r}, expected one of {', '.join(self.manifest.splits)}")
        self.shards = sorted(self.manifest.splits[split].shards, key=lambda shard: (shard.pair_set, shard.file))
        for shard in self.shards:
            _check_size(self.folder / shard.file, shard)
        sizes, shard_of, batch_of, pair_set = [], [], [], []
        for number, shard in enumerate(self.shards):
            for batch, start in enumerate(range(0, shard.samples, SAMPLES_PER_BLOCK)):
                sizes.append(min(SAMPLES_PER_BLOCK, shard.samples - start))
                shard_of.append(number)
                batch_of.append(batch)
                pair_set.append(shard.pair_set)
        self.block_sizes = np.array(sizes, np.int64)
        self.block_starts = ragged.to_offsets(self.block_sizes)
        self._place = list(zip(shard_of, batch_of, strict=True))
        self._pair_set_of_block = np.array(pair_set, np.int64)
        self._readers: OrderedDict[tuple[int, int | None], pa.ipc.RecordBatchFileReader] = OrderedDict()
        self._window: tuple[tuple, Window] | None = None

    @property
    def num_samples(self) -> int:
        return int(self.block_starts[-1])

    @property
    def epoch_sizes(self) -> list[int]:
        count = self.manifest.pair_sets if self.split == "train" else 1
        return [int(self.block_sizes[self._pair_set_of_block == number].sum()) for number in range(count)]

    def blocks_of_pair_set(self, pair_set: int) -> np.ndarray:
        """The numbers of the blocks of one pair set, ascending and adjacent."""
        return np.flatnonzero(self._pair_set_of_block == pair_set)

    def take(self, indices: np.ndarray, mask_set: int | None = 0) -> tuple[Samples, Masks | None]:
        """Samples by index (B,), in that order, with one mask set (None: without)."""
        indices = np.asarray(indices, np.int64)
        block_of = np.searchsorted(self.block_starts, indices, side="right") - 1
        blocks, place = np.unique(block_of, return_inverse=True)
        key = (tuple(blocks.tolist()), mask_set)
        if self._window is None or self._window[0] != key:  # neighbours in an order come from the same blocks
            self._window = (key, self.window(blocks, mask_set))
        first = ragged.to_offsets(self.block_sizes[blocks])[:-1]
        return self._window[1].take(first[place] + indices - self.block_starts[block_of])

    def window(self, blocks: np.ndarray, mask_set: int | None = 0) -> Window:
        """Decode blocks into one window; its rows are theirs, one block after another."""
        if mask_set is not None and not 0 <= mask_set < self.manifest.mask_sets:
            raise UserError(f"{self.folder}: found {self.manifest.mask_sets} mask sets, asked for set {mask_set}")
        by_shard: dict[int, list[int]] = {}
        for place, block in enumerate(blocks):
            by_shard.setdefault(self._place[block][0], []).append(place)
        batches: list[pa.RecordBatch | None] = [None] * len(blocks)

        def decode(shard: int, reader: pa.ipc.RecordBatchFileReader) -> None:
            for place in by_shard[shard]:
                batches[place] = self._decode(self._place[blocks[place]], reader, mask_set)

        shards = list(by_shard)
        # Decompression and checksums release the interpreter's lock; an open shard is for one thread at a time.
        with ThreadPoolExecutor(_DECODERS) as pool:
            for start in range(0, len(shards), _OPEN_SHARDS):  # a window of short samples comes from hundreds
                some = shards[start : start + _OPEN_SHARDS]
                list(pool.map(decode, some, [self._reader(shard, mask_set) for shard in some]))
        return _to_window(batches, mask_set, self.manifest)

    def _decode(self, place: tuple[int, int], reader, mask_set: int | None) -> pa.RecordBatch:
        shard, number = place
        path = self.folder / self.shards[shard].file
        try:
            batch, metadata = reader.get_batch_with_custom_metadata(number)
            groups = [("base", [batch.column(name) for name in BASE_COLUMNS])]
            if mask_set is not None:
                groups.append((str(mask_set), [batch.column(name) for name in mask_columns(mask_set)]))
            intact = all(
                int(metadata[f"{_CHECKSUM}.{name}"]) == _checksum(columns) for name, columns in groups
            ) and batch.num_rows == min(SAMPLES_PER_BLOCK, self.shards[shard].samples - number * SAMPLES_PER_BLOCK)
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(_damaged(path, f"block {number} can't be read: {error}")) from error
        if not intact:
            raise UserError(_damaged(path, f"block {number} has another checksum than when it was written"))
        return batch

    def _reader(self, shard: int, mask_set: int | None) -> pa.ipc.RecordBatchFileReader:
        """An open shard that decodes the wanted columns only."""
        key = (shard, mask_set)
        if key not in self._readers:
            path = self.folder / self.shards[shard].file
            schema = shard_schema(self.manifest.vocab_size, self.manifest.mask_sets)
            wanted = (*BASE_COLUMNS, *(() if mask_set is None else mask_columns(mask_set)))
            options = pa.ipc.IpcReadOptions(
                included_fields=[schema.get_field_index(name) for name in wanted], use_threads=False
            )
            try:
                with readable_errors(path):
                    self._readers[key] = pa.ipc.open_file(pa.memory_map(str(path)), options=options)
            except pa.ArrowException as error:
                raise UserError(_damaged(path, str(error))) from error
            if len(self._readers) > _OPEN_SHARDS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(key)
        return self._readers[key]


def _check_size(path: Path, shard: ShardInfo) -> None:
    if not path.is_file():
        raise UserError(f"{path}: found no such shard, though the manifest names it; prepare the data again")
    if path.stat().st_size != shard.bytes:
        raise UserError(_damaged(path, f"found {path.stat().st_size} bytes, expected {shard.bytes}"))


def _damaged(path: Path, what: str) -> str:
    what = " ".join(what.split())
    return f"{path}: damaged shard: {what}; restore the file or prepare the data into another folder"


def _to_window(batches: list[pa.RecordBatch], mask_set: int | None, manifest: Manifest) -> Window:
    token = token_type(manifest.vocab_size).to_pandas_dtype()
    input_ids, offsets = _flat(batches, INPUT_IDS, token)
    samples = Samples(
        input_ids=input_ids,
        offsets=offsets,
        segment_b_start=_column(batches, SEGMENT_B_START, np.uint16),
        next_sentence_label=_column(batches, NEXT_SENTENCE_LABEL, np.int8),
        document=_column(batches, DOCUMENT, np.uint64),
    )
    if mask_set is None:
        return Window(samples, None)
    positions, ids = mask_columns(mask_set)
    flat_positions, mask_offsets = _flat(batches, positions, np.uint16)
    flat_ids, _ = _flat(batches, ids, token)
    return Window(samples, Masks(flat_positions, flat_ids, mask_offsets))


def _flat(batches: list[pa.RecordBatch], name: str, dtype) -> tuple[np.ndarray, np.ndarray]:
    columns = [batch.column(name) for batch in batches]
    values = [ragged.from_arrow(column.values) for column in columns] or [np.empty(0, dtype)]
    lengths = [np.diff(ragged.from_arrow(column.offsets)) for column in columns] or [np.empty(0, np.int64)]
    return np.concatenate(values), ragged.to_offsets(np.concatenate(lengths))


def _column(batches: list[pa.RecordBatch], name: str, dtype) -> np.ndarray:
    columns = [batch.column(name) for batch in batches]
    values = [ragged.from_arrow(column.fill_null(NO_LABEL) if column.null_count else column) for column in columns]
    return np.concatenate(values or [np.empty(0, dtype)])
