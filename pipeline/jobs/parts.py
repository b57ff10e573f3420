"""Parts: intermediate files of a preparation with tokenized documents in the order of their hash.

A part is written once and read by ranges of hashes. It consists of blocks of some 128 KiB, each with the columns of
some documents; then an index with the first hash, offset, counts and checksums of each block; then the index's checksum
and length. Reading a range takes three reads, however large the part is. A changed byte is detected when it is read
(`DamagedPart`), and so is another part in its place; the part is made again.
"""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.jobs.duplicates import distinct
from cloze.pipeline.jobs.run_folder import mark_of
from cloze.pipeline.storage import publishing, readable_errors
from cloze.pipeline.stores.places import Place, StorePath, to_place
from cloze.pipeline.untrusted import check_regular

Table = dict[str, np.ndarray]

# Columns of a document. The hash is the first column of a block with its own checksum, so that it can be read alone.
_COLUMNS = {
    "hash": np.uint64,
    "hash_rest": np.uint64,
    "document": np.uint64,
    "order": np.uint64,
    "duplicate_tokens": np.uint64,
    "num_sentences": np.uint32,
    "num_tokens": np.uint32,
    "duplicates": np.uint32,
    "source": np.uint16,
}
_DOCUMENT_BYTES = sum(np.dtype(dtype).itemsize for dtype in _COLUMNS.values())
_SENTENCE = np.dtype(np.uint32)  # length of a sentence in tokens
_BLOCK_BYTES = 128 << 10  # one of 512 ranges in a part of 64 MiB
_INDEX = np.dtype(
    [
        ("hash", "<u8"),
        ("offset", "<u8"),
        ("documents", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
        ("hash_crc", "<u4"),
        ("crc", "<u4"),
    ]
)
_AT_ONCE = 8  # parts that are read from a store concurrently
_TRAILER = np.dtype([("blocks", "<u4"), ("crc", "<u4")])
# Initial value of the index's CRC: with 0 a file ending in zeros would look like a part without blocks.
_CRC_START = 0x50415254


class DamagedPart(Exception):
    """A part that is missing or damaged."""

    def __init__(self, path: str | Place):
        super().__init__(str(path))  # a text, since what a client holds can't be sent to another process
        self.path = to_place(path)


def empty(dtype: np.dtype) -> Table:
    """A table without documents.

    Args:
        dtype: of the tokens.
    """
    kinds = _COLUMNS | {"sentences": _SENTENCE, "tokens": dtype}
    return {name: np.empty(0, kind) for name, kind in kinds.items()}


def joined(tables: list[Table]) -> Table:
    """Concatenate tables. Columns: those of `_COLUMNS` (D,), `sentences` (S,), `tokens` (T,)."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def write(path: Place, table: Table) -> tuple[int, int]:
    """Write the distinct documents of a table as a part, atomically.

    Returns:
        Their number and tokens.
    """
    rows, duplicates, duplicate_tokens = distinct(table)
    columns = {name: table[name][rows] for name in _COLUMNS}
    columns |= {"duplicates": duplicates, "duplicate_tokens": duplicate_tokens}
    flat = [
        (name, ragged.to_offsets(table[f"num_{name}"])[:-1][rows], columns[f"num_{name}"].astype(np.int64))
        for name in ("sentences", "tokens")
    ]
    sizes = _DOCUMENT_BYTES + flat[0][2] * _SENTENCE.itemsize + flat[1][2] * table["tokens"].itemsize
    ends = np.cumsum(sizes)
    cuts = ragged.union(
        np.searchsorted(ends, np.arange(0, ends[-1] if len(ends) else 0, _BLOCK_BYTES)), np.array([len(rows)])
    )
    index = np.zeros(len(cuts) - 1, _INDEX)
    with publishing(path) as aside, open(aside, "wb") as file:
        for number, (low, high) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            hashes, *others = (column[low:high] for column in columns.values())
            for name, starts, lengths in flat:
                others.append(ragged.gather(table[name], starts[low:high], lengths[low:high]))
            rest = b"".join(others)
            index[number] = (
                hashes[0],
                file.tell(),
                high - low,
                len(others[-2]),
                len(others[-1]),
                zlib.crc32(hashes),
                zlib.crc32(rest),
            )
            file.write(hashes)
            file.write(rest)
        file.write(index.data)
        file.write(np.array((len(index), zlib.crc32(index.data, _crc_start(path))), _TRAILER).data)
    return len(rows), int(flat[1][2].sum())


def read(path: Place, low: int, high: int, dtype: np.dtype) -> list[Table]:
    """The documents of a part with low <= hash < high, as a table per block.

    Args:
        dtype: of the tokens.
    """
    with _open(path) as part:
        index = _read_index(part)
        blocks = index[_places(index, low, high)]
        if not len(blocks):
            return []
        begin = int(blocks["offset"][0])
        data = part.read(begin, int(blocks["offset"][-1]) + _size(blocks[-1], dtype) - begin)
    tables = []
    for block in blocks:
        start = int(block["offset"]) - begin
        rest = start + 8 * int(block["documents"])
        if (zlib.crc32(data[start:rest]), zlib.crc32(data[rest : start + _size(block, dtype)])) != (
            block["hash_crc"],
            block["crc"],
        ):
            raise DamagedPart(path)
        table = _table(data, start, block, dtype)
        if (rows := _within(table["hash"], low, high)).start < rows.stop:
            tables.append(_part(table, rows))
    return tables


def read_all(folder: Place, names: list[str], low: int, high: int, dtype: np.dtype) -> list[Table]:
    """As `read` for several parts, in their order; parts in a store are read concurrently because of its latency."""
    if isinstance(folder, StorePath):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            tables_of_parts = list(pool.map(lambda name: read(folder / name, low, high, dtype), names))
    else:
        tables_of_parts = [read(folder / name, low, high, dtype) for name in names]
    return [table for tables in tables_of_parts for table in tables]


def read_hashes(path: Place, high: int) -> np.ndarray:
    """The hashes of a part below `high`, ascending."""
    with _open(path) as part:
        index = _read_index(part)
        blocks: list[np.ndarray] = [np.empty(0, np.uint64)]
        for block in index[_places(index, 0, high)]:
            data = part.read(int(block["offset"]), 8 * int(block["documents"]))
            if zlib.crc32(data) != block["hash_crc"]:
                raise DamagedPart(path)
            blocks.append(np.frombuffer(data, np.uint64))
    hashes = np.concatenate(blocks)
    return hashes[_within(hashes, 0, high)]


@dataclass(frozen=True)
class _Opened:
    """A part that is read.

    Args:
        read_range: its bytes [start, stop); in a store a request for each call.
    """

    path: Place
    size: int
    read_range: Callable[[int, int], bytes]

    def read(self, start: int, count: int) -> memoryview:
        """`count` bytes from `start` on."""
        data = self.read_range(start, start + count) if count and 0 <= start <= self.size - count else b""
        if len(data) < count:
            raise DamagedPart(self.path)
        return memoryview(data)


@contextmanager
def _open(path: Place) -> Iterator[_Opened]:
    if not isinstance(path, StorePath):
        check_regular(path)
    with readable_errors(path):
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise DamagedPart(path) from error
        if isinstance(path, StorePath):
            yield _Opened(path, size, path.read_range)
            return
        with open(path, "rb") as file:

            def read_range(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            yield _Opened(path, size, read_range)


def _read_index(part: _Opened) -> np.ndarray:
    end = part.size - _TRAILER.itemsize
    trailer = np.frombuffer(part.read(end, _TRAILER.itemsize), _TRAILER)[0]
    length = int(trailer["blocks"]) * _INDEX.itemsize
    data = part.read(end - length, length)
    if zlib.crc32(data, _crc_start(part.path)) != trailer["crc"]:
        raise DamagedPart(part.path)
    return np.frombuffer(data, _INDEX)


def _crc_start(path: Place) -> int:
    return zlib.crc32(mark_of(path), _CRC_START)


def _places(index: np.ndarray, low: int, high: int) -> slice:
    """The blocks that may have hashes in [low, high), including one that begins below `low`."""
    within = _within(index["hash"], low, high)
    return slice(max(0, within.start - 1), within.stop)


def _within(hashes: np.ndarray, low: int, high: int) -> slice:
    """Slice of ascending hashes in [low, high); `high` may be 2^64."""
    stop = len(hashes) if high >= 1 << 64 else int(np.searchsorted(hashes, np.uint64(high)))
    return slice(int(np.searchsorted(hashes, np.uint64(low))), stop)


def _size(block: np.void, dtype: np.dtype) -> int:
    return (
        int(block["documents"]) * _DOCUMENT_BYTES
        + int(block["sentences"]) * _SENTENCE.itemsize
        + int(block["tokens"]) * dtype.itemsize
    )


def _table(data: memoryview, start: int, block: np.void, dtype: np.dtype) -> Table:
    table = {}
    columns: list[tuple[str, np.dtype, int]] = [
        *((name, np.dtype(kind), int(block["documents"])) for name, kind in _COLUMNS.items()),
        ("sentences", _SENTENCE, int(block["sentences"])),
        ("tokens", dtype, int(block["tokens"])),
    ]
    for name, kind, count in columns:
        table[name] = np.frombuffer(data, kind, count, start)
        start += count * kind.itemsize
    return table


def _part(table: Table, rows: slice) -> Table:
    """A slice of the rows of a table, over the same memory."""
    part = {name: table[name][rows] for name in _COLUMNS}
    for name in ("sentences", "tokens"):
        start = int(table[f"num_{name}"][: rows.start].sum(dtype=np.int64))
        part[name] = table[name][start : start + int(part[f"num_{name}"].sum(dtype=np.int64))]
    return part
