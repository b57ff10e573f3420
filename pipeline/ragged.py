"""Vectorized operations on ragged arrays (flat arrays with offsets), and their conversion to and from Arrow."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Ranges with a larger mean length are copied one by one: indices would take four bytes of memory per element, whose
# pages the system must clear each time.
_LONG = 64
# Mean number of elements in runs of rows of equal length from which on a Python loop over the runs is faster.
_LONG_RUN = 2048
# Use the C library's allocator, which keeps freed memory (allocator.py): Arrow's own allocator soon returns freed
# pages, and clearing them again took a fifth of the loading time.
POOL = pa.system_memory_pool()


def to_offsets(lengths: np.ndarray) -> np.ndarray:
    """Lengths (N,) to offsets (N+1,) int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of all [start, start + length), one range after another, as int64."""
    offsets = to_offsets(lengths)
    indices = np.repeat(starts - offsets[:-1], lengths)
    indices += np.arange(offsets[-1])
    return indices


def gather(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """values[start : start + length] of every range, one after another."""
    if len(starts) and lengths.sum() > _LONG * len(starts):
        stops = (starts + lengths).tolist()
        return np.concatenate([values[low:high] for low, high in zip(starts.tolist(), stops, strict=True)])
    return values.take(ranges(starts, lengths))


def take(values: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n,) of a ragged array, concatenated, with their offsets (n+1,). The results are read-only.

    Arrow copies each row as a byte string: for short rows in a third, for long ones in a ninth of the time of `gather`.
    """
    size = values.itemsize
    strings = pa.Array.from_buffers(
        pa.large_binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets * size), pa.py_buffer(np.ascontiguousarray(values))],
    )
    taken = pc.take(strings, to_arrow(np.asarray(rows, np.int64)), memory_pool=POOL)
    _, bounds, data = taken.buffers()
    taken_offsets = np.frombuffer(bounds, np.int64, len(taken) + 1) // size
    flat = np.frombuffer(data, values.dtype, int(taken_offsets[-1])) if data else np.empty(0, values.dtype)
    return flat, taken_offsets


def union(*ascending: np.ndarray) -> np.ndarray:
    """The distinct values of ascending arrays, ascending: as `np.unique`, in the time of a merge."""
    merged = np.sort(np.concatenate(ascending), kind="stable")
    return merged[np.diff(merged, prepend=merged[:1] - 1) != 0]


def within(offsets: np.ndarray) -> np.ndarray:
    """The index of every element of a ragged array within its row: 0, 1, 2, 0, 1, …"""
    lengths = np.diff(offsets)
    first = np.flatnonzero(np.diff(lengths, prepend=-1))  # rows whose length differs from the one before
    if len(first) * _LONG_RUN > offsets[-1]:
        places = np.arange(offsets[-1])
        places -= np.repeat(offsets[:-1], lengths)
        return places
    # Rows of one length form a table with identical rows, written by one broadcast.
    places = np.empty(offsets[-1], np.int64)
    bounds = [*offsets[first].tolist(), len(places)]
    for low, high, length in zip(bounds[:-1], bounds[1:], lengths[first].tolist(), strict=True):
        if length:
            places[low:high].reshape(-1, length)[:] = np.arange(length)
    return places


def to_arrow(values: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """An Arrow array over the same memory; null where `valid` is false.

    `pa.array` does this too, but imports pandas if it is installed, which takes longer than preparing a book.
    """
    validity = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [validity, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def from_arrow(array: pa.Array, null: int | None = None) -> np.ndarray:
    """The numbers of an Arrow array, over the same memory where it has no nulls and without pandas (see `to_arrow`).

    Args:
        null: stands for each null; None for an array without them.
    """
    dtype = np.dtype(str(array.type))
    if null is not None and array.null_count:
        array = array.fill_null(to_arrow(np.array([null], dtype))[0])  # of a number it would make a `pa.scalar`
    data = array.buffers()[1]
    if data is None:  # an empty array
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, count=len(array), offset=array.offset * dtype.itemsize)
