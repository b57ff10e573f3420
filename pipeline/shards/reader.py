"""Samples of a split's shards, by index or by blocks; from a store, what is damaged is fetched again."""

import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError, lacks_threads
from cloze.pipeline.records import (
    BASE_COLUMNS,
    DOCUMENT,
    INPUT_IDS,
    NEXT_SENTENCE_LABEL,
    NO_LABEL,
    SEGMENT_B_START,
    SOURCE,
    Masks,
    Samples,
    mask_columns,
    numpy_type,
    shard_schema,
    token_type,
)
from cloze.pipeline.shards.checks import block_fault
from cloze.pipeline.shards.manifest import FILE_NAME, REPAIR, Manifest, ShardTable
from cloze.pipeline.shards.shard_file import BAD, Shard, is_intact, samples_per_block
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.stores.cache import Cache, CachedFile
from cloze.pipeline.stores.places import Place, StorePath, to_place
from cloze.pipeline.stores.reading import scratch_cache

_DECODERS = 2  # threads that decompress blocks; more would compete with the training process
_ASKING = 16  # threads that ask for sizes: a remote file system takes its time for each
_FETCHES = 2  # number of times that damaged data in the cache is fetched again
# Of a block: columns of lists at most (tokens, and a mask set's places and tokens, of up to 4 bytes each), and bytes a
# sample for all else; and bytes for the padding of its buffers, to be generous.
_LISTS, _REST, _PADDING = 3, 64, 1 << 16
# maximum of open shards: by default a process may open 1,024 files, on macOS 256, and training opens others
_OPEN_SHARDS = 64


@dataclass(frozen=True)
class ShardWindow:
    """Some blocks, decoded into flat arrays; rows are gathered without a Python loop over samples."""

    samples: Samples
    masks: Masks

    def take(self, rows: np.ndarray) -> tuple[Samples, Masks]:
        """The rows (B,) of this window, in the given order."""
        source = self.samples
        input_ids, offsets = ragged.take(source.input_ids, source.offsets, rows)
        samples = Samples(
            input_ids=input_ids,
            offsets=offsets,
            segment_b_start=source.segment_b_start[rows],
            next_sentence_label=source.next_sentence_label[rows],
            document=source.document[rows],
            source=source.source[rows],
        )
        positions, offsets = ragged.take(self.masks.positions, self.masks.offsets, rows)
        ids, _ = ragged.take(self.masks.ids, self.masks.offsets, rows)
        return samples, Masks(positions, ids, offsets)


class ShardReader:
    """Reads one split of a prepared folder by blocks (record batches of about 131,072 tokens; format 1: 4,096 samples).

    One process of a run is enough. Damaged data in it is fetched again.

    num_samples: samples of the split, over all pair sets. epoch_sizes: samples of each pair set, through which
    epochs cycle. block_sizes (num_blocks,): samples of each block. mean_length: tokens a sample.

    Args:
        check_sizes: whether to check each shard's size at once.
        cache: local cache for a store; None: a temporary folder, removed with this process.

    Raises:
        UserError: the folder holds no manifest, a shard is missing or has another size (if asked for), or a block is
            damaged (when it is read: each carries a checksum).
    """

    def __init__(self, folder: str | Place, split: str = "train", check_sizes: bool = True, cache: Cache | None = None):
        self.folder = to_place(folder)
        self._cache = (cache or scratch_cache()) if isinstance(self.folder, StorePath) else None
        # Blocks (with a mask set) that are being fetched.
        self._ahead: dict[tuple[int, int | None], Future[pa.RecordBatch]] = {}
        self.split = split
        self.manifest = Manifest.load(folder)
        if split not in self.manifest.splits:
            raise UserError(f"{folder}: found no split {split!r}, expected one of {', '.join(self.manifest.splits)}")
        self.shards = self.manifest.splits[split].shards
        if check_sizes and (fault := fault_of_shards(self.folder, split, self.shards)):
            raise UserError(f"{fault}; {REPAIR}")
        pair_sets = np.array(self.shards.pair_set, np.int64)
        order = np.argsort(pair_sets, kind="stable")  # order of shards in which the samples of a pair set are adjacent
        samples = np.array(self.shards.samples, np.int64)[order]
        tokens = np.array(self.shards.tokens, np.int64)[order]
        self.mean_length = float(tokens.sum() / max(1, samples.sum()))
        version = self.manifest.format_version
        rows = samples_per_block(samples, tokens, version)
        counts = -(-samples // rows)
        self._shard_of = np.repeat(order, counts)
        self._number_of = ragged.within(ragged.to_offsets(counts))  # number of a block within its shard
        rows = np.repeat(rows, counts)
        self.block_sizes = np.minimum(rows, np.repeat(samples, counts) - self._number_of * rows)
        self.block_starts = ragged.to_offsets(self.block_sizes)
        in_blocks = np.bincount(pair_sets[self._shard_of], minlength=self.manifest.pair_sets)
        self._pair_set_starts = ragged.to_offsets(in_blocks)
        self._columns = BASE_COLUMNS if version > 1 else BASE_COLUMNS[:-1]
        schema = shard_schema(self.manifest.vocab_size, self.manifest.mask_sets)
        self._schema = schema if version > 1 else schema.remove(schema.get_field_index(SOURCE))
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._window: tuple[tuple[object, ...], ShardWindow] | None = None

    @property
    def num_samples(self) -> int:
        return int(self.block_starts[-1])

    @property
    def epoch_sizes(self) -> list[int]:
        count = self.manifest.pair_sets if self.split == "train" else 1
        return [int(self.block_sizes[self.blocks_of_pair_set(number)].sum()) for number in range(count)]

    def blocks_of_pair_set(self, pair_set: int) -> np.ndarray:
        """The numbers of the blocks of one pair set, ascending and adjacent."""
        return np.arange(*self._pair_set_starts[[pair_set, pair_set + 1]])

    def take(self, indices: np.ndarray, mask_set: int | None = 0) -> tuple[Samples, Masks]:
        """Samples by index (B,), in that order, with one mask set (None: without masks)."""
        indices = np.asarray(indices, np.int64)
        block_of = np.searchsorted(self.block_starts, indices, side="right") - 1
        blocks, place = np.unique(block_of, return_inverse=True)
        key = (tuple(blocks.tolist()), mask_set)
        if self._window is None or self._window[0] != key:  # neighbouring samples are in the same blocks
            self._window = (key, self.window(blocks, mask_set))
        first = ragged.to_offsets(self.block_sizes[blocks])[:-1]
        return self._window[1].take(first[place] + indices - self.block_starts[block_of])

    def window(self, blocks: np.ndarray, mask_set: int | None = 0) -> ShardWindow:
        """Decode blocks into one window with their concatenated rows."""
        if mask_set is not None and not 0 <= mask_set < self.manifest.mask_sets:
            raise UserError(f"{self.folder}: found {self.manifest.mask_sets} mask sets, asked for set {mask_set}")
        if self._cache:
            self.fetch(blocks, mask_set)
            for block in blocks.tolist():
                self._ahead.pop((block, mask_set)).result()
        by_shard: dict[int, list[int]] = {}
        for row, shard in enumerate(self._shard_of[blocks].tolist()):
            by_shard.setdefault(shard, []).append(row)
        batches: list[pa.RecordBatch | None] = [None] * len(blocks)

        def decode(shard: int, opened: Shard) -> None:
            for row in by_shard[shard]:
                batches[row], opened = self._decode(int(blocks[row]), opened, mask_set)
            self._open[shard] = opened

        shards = list(by_shard)
        if len(shards) == 1:
            decode(shards[0], self._opened(shards[0]))
        else:
            # Decompression and checksums release the interpreter's lock; an open shard is for one thread at a time.
            with ThreadPoolExecutor(_DECODERS) as pool:
                for start in range(0, len(shards), _OPEN_SHARDS):  # a window may have blocks of hundreds of shards
                    some = shards[start : start + _OPEN_SHARDS]
                    list(pool.map(decode, some, [self._opened(shard) for shard in some]))
        return _to_window(batches, mask_set, self.manifest)

    @property
    def is_stored(self) -> bool:
        """Whether blocks come from a store, so that fetching them early is useful."""
        return self._cache is not None

    def fetch(self, blocks: np.ndarray, mask_set: int | None) -> None:
        """Begin to fetch blocks that will be needed soon, each once. Errors are raised when they are read."""
        assert self._cache is not None, "only what a store has is fetched"
        by_shard: dict[int, list[int]] = {}
        for block in blocks.tolist():
            if (block, mask_set) not in self._ahead:
                by_shard.setdefault(int(self._shard_of[block]), []).append(block)
        for shard, some in by_shard.items():
            future = self._cache.requests.submit(self._fetch_blocks, shard, some, mask_set)
            self._ahead |= {(block, mask_set): future for block in some}

    def _fetch_blocks(self, shard: int, blocks: list[int], mask_set: int | None) -> None:
        with suppress(_Damaged):  # errors are raised when the block is read
            self._open_shard(shard).fetch([int(self._number_of[block]) for block in blocks], mask_set)

    def cancel(self) -> None:
        """Cancel early fetches."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def _decode(self, block: int, opened: Shard, mask_set: int | None) -> tuple[pa.RecordBatch, Shard]:
        """A decoded block, and its open shard. Damaged data in the cache is fetched again, and the shard opened anew.

        Raises:
            UserError: it stays damaged.
        """
        for _ in range(_FETCHES if self._cache else 0):
            try:
                return self._decode_once(block, opened, mask_set), opened
            except _Damaged:
                opened.forget(int(self._number_of[block]), mask_set)
                opened = self._open_shard(int(self._shard_of[block]))
        return self._decode_once(block, opened, mask_set), opened

    def _decode_once(self, block: int, opened: Shard, mask_set: int | None) -> pa.RecordBatch:
        shard, number = int(self._shard_of[block]), int(self._number_of[block])
        fields = list(range(len(self._columns)))
        if mask_set is not None:
            fields += [len(fields) + 2 * mask_set, len(fields) + 2 * mask_set + 1]
        try:
            most = int(self.block_sizes[block]) * (_LISTS * 4 * (self.manifest.max_length + 1) + _REST) + _PADDING
            batch, metadata = opened.read(number, fields, mask_set, most)
            batch.validate()  # buffers have the sizes that the lengths ask for, which numpy's views of them trust
            intact = batch.num_rows == self.block_sizes[block] and is_intact(batch, metadata, self._columns, mask_set)
        except UserError:
            raise
        except BAD as error:
            if lacks_threads(error):  # which is no damage
                raise
            raise _damaged(
                self._path(shard), f"block {number} can't be read: {' '.join(str(error).split())}"
            ) from error
        if not intact:
            raise _damaged(self._path(shard), f"block {number} has another checksum than when it was written")
        # Right checksums may have been computed for content that would read foreign memory.
        if fault := block_fault(batch, mask_set, self.manifest.vocab_size, self.manifest.max_length):
            raise _damaged(self._path(shard), f"block {number}: {fault}")
        return batch

    def faults(self) -> Iterator[str]:
        """A line for each shard whose content is wrong, of all blocks with all mask sets; if there is none, for each
        count of the manifest that is another than theirs.
        """
        mask_sets: list[int | None] = [*range(self.manifest.mask_sets)] or [None]
        split = self.manifest.splits[self.split]
        path, intact = self.folder / FILE_NAME, True
        lengths, masked = np.zeros(len(split.length_histogram), np.int64), 0
        for shard in range(len(self.shards)):
            tokens = 0
            try:
                for block in np.flatnonzero(self._shard_of == shard).tolist():
                    for number, mask_set in enumerate(mask_sets):
                        window = self.window(np.array([block]), mask_set)
                        if number == 0:  # the counts are of the first mask set
                            found = np.diff(window.samples.offsets)
                            tokens += int(found.sum())
                            masked += len(window.masks.ids)
                            lengths += np.bincount(np.minimum(found, len(lengths) - 1), minlength=len(lengths))
            except UserError as error:
                intact = False
                yield str(error)
                continue
            if tokens != self.shards.tokens[shard]:
                intact = False
                yield f"{self._path(shard)}: found {tokens:,} tokens, expected {self.shards.tokens[shard]:,}"
        if intact and lengths.tolist() != split.length_histogram:
            yield f"{path}: {self.split}: found a length_histogram of other lengths than its shards have"
        if intact and masked != (counted := split.counts.get("masked", 0)):
            yield f"{path}: {self.split}: found {counted} masked tokens in counts, expected {masked}, as in its shards"

    def _opened(self, shard: int) -> Shard:
        if shard in self._open and self._open[shard].removed:
            del self._open[shard]
        if shard not in self._open:
            self._open[shard] = self._open_shard(shard)
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    def _open_shard(self, shard: int) -> Shard:
        """Open a shard; a damaged copy in the cache is fetched again.

        Raises:
            UserError: the file is damaged or missing.
        """
        path = self._path(shard)
        for number in range(1 + (_FETCHES if self._cache else 0)):
            with readable_errors(path):
                file = self._copy(shard) if self._cache else pa.OSFile(str(path))
            try:
                if not self._cache and hasattr(os, "posix_fadvise"):
                    # No read-ahead, which would read unused columns.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                return Shard(file, self._schema, self.manifest.mask_sets, self.manifest.format_version)
            except UserError:
                raise
            except BAD as error:
                if lacks_threads(error):
                    raise
                if not self._cache or number == _FETCHES:
                    raise _damaged(path, str(error)) from error
                file.forget([(0, file.size)])
        raise AssertionError("unreachable: the last try returns or raises")

    def _copy(self, shard: int) -> CachedFile:
        """The cached copy of a stored shard, identified by its hash in the manifest, whatever its URL."""
        file, size = self.shards.file[shard], self.shards.bytes[shard]
        assert self._cache is not None and isinstance(self.folder, StorePath), "only a stored shard has a copy"
        return self._cache.open(self.folder / file, size, f"{self.manifest.hash} {file}")

    def _path(self, shard: int) -> Place:
        return self.folder / self.shards.file[shard]


def fault_of_shards(folder: Place, split: str, shards: ShardTable) -> str | None:
    """The first shard of a split that is not in a prepared folder, or has another size; else None."""
    if isinstance(folder, StorePath):  # one listing request returns a thousand objects
        start = len(f"{folder.key}/") if folder.key else 0
        sizes = {each.key[start:]: each.size for each in (folder / split).objects()}
    else:
        with readable_errors(folder), ThreadPoolExecutor(_ASKING) as pool:
            parts = [shards.file[start::_ASKING] for start in range(_ASKING)]
            sizes = dict(itertools.chain.from_iterable(pool.map(partial(_sizes, folder), parts)))
    for file, expected in zip(shards.file, shards.bytes, strict=True):
        if file not in sizes:
            return f"{folder / file}: found no such shard, though the manifest names it"
        if sizes[file] != expected:
            return f"{folder / file}: damaged shard: found {sizes[file]} bytes, expected {expected}"
    return None


def _sizes(folder: Place, files: list[str]) -> list[tuple[str, int]]:
    """The files of these names that there are, with their sizes."""
    sizes = []
    for file in files:
        with suppress(FileNotFoundError, NotADirectoryError):
            sizes.append((file, os.stat(f"{folder}/{file}").st_size))
    return sizes


class _Damaged(UserError):
    """A damaged shard."""


def _damaged(path: Place, what: str) -> _Damaged:
    what = " ".join(what.split())
    return _Damaged(f"{path}: damaged shard: {what}; {REPAIR}")


def _to_window(batches: list[pa.RecordBatch], mask_set: int | None, manifest: Manifest) -> ShardWindow:
    token = numpy_type(token_type(manifest.vocab_size))
    input_ids, offsets = _flat(batches, INPUT_IDS, token)
    samples = Samples(
        input_ids=input_ids,
        offsets=offsets,
        segment_b_start=_column(batches, SEGMENT_B_START, np.uint16),
        next_sentence_label=_column(batches, NEXT_SENTENCE_LABEL, np.int8),
        document=_column(batches, DOCUMENT, np.uint64),
        source=np.zeros(len(offsets) - 1, np.uint16)
        if manifest.format_version == 1
        else _column(batches, SOURCE, np.uint16),
    )
    if mask_set is None:
        return ShardWindow(samples, Masks.none(len(samples)))
    positions, ids = mask_columns(mask_set)
    flat_positions, mask_offsets = _flat(batches, positions, np.uint16)
    flat_ids, _ = _flat(batches, ids, token)
    return ShardWindow(samples, Masks(flat_positions, flat_ids, mask_offsets))


def _flat(batches: list[pa.RecordBatch], name: str, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    columns = [batch.column(name) for batch in batches]
    values = [ragged.from_arrow(column.values) for column in columns] or [np.empty(0, dtype)]
    lengths = [np.diff(ragged.from_arrow(column.offsets)) for column in columns] or [np.empty(0, np.int64)]
    return np.concatenate(values), ragged.to_offsets(np.concatenate(lengths))


def _column(batches: list[pa.RecordBatch], name: str, dtype: DTypeLike) -> np.ndarray:
    columns = [batch.column(name) for batch in batches]
    values = [ragged.from_arrow(column, null=NO_LABEL) for column in columns]
    return np.concatenate(values or [np.empty(0, dtype)])
