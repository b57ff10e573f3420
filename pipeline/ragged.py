"""Operations on ragged arrays (flat arrays with offsets) without a Python step per row, and their conversion to
Arrow."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Ranges of more elements than this on average are copied one by one: by index they would take four bytes of memory for
# each of theirs, whose pages the system clears anew each time.
_LONG = 64
# Elements in runs of rows of one length, on average, from which on a step of Python for each run is worth it.
_LONG_RUN = 2048
# The C library's memory, which training and preparing let it keep (allocator.py): Arrow's own allocator gives pages
# back a moment after they were freed, and a fifth of the time of loading went into clearing them again.
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
    """Rows (n,) of a ragged array, one after another, with their offsets (n+1,). What is returned can't be written to.

    Arrow copies each row at once, as a string of bytes: short rows in a third, long ones in a ninth of the time that
    `gather` takes.
    """
    size = values.itemsize
    strings = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [
        None, pa.py_buffer(offsets * size), pa.py_buffer(np.ascontiguousarray(values))])
    taken = pc.take(strings, to_arrow(np.asarray(rows, np.int64)), memory_pool=POOL)
    _, bounds, data = taken.buffers()
    found = np.frombuffer(bounds, np.int64, len(taken) + 1) // size
    return np.frombuffer(data, values.dtype, int(found[-1])) if data else np.empty(0, values.dtype), found


def union(*ascending: np.ndarray) -> np.ndarray:
    """The distinct values of ascending arrays, ascending: `np.unique` of them, in the time that merging takes."""
    merged = np.sort(np.concatenate(ascending), kind="stable")
    return merged[np.diff(merged, prepend=merged[:1] - 1) != 0]


def within(offsets: np.ndarray) -> np.ndarray:
    """For every element of a ragged array its place inside its row: 0, 1, 2, 0, 1, …"""
    lengths = np.diff(offsets)
    first = np.flatnonzero(np.diff(lengths, prepend=-1))  # rows that are longer or shorter than the one before
    if len(first) * _LONG_RUN > offsets[-1]:
        places = np.arange(offsets[-1])
        places -= np.repeat(offsets[:-1], lengths)
        return places
    # Rows of one length are a table, of which every row is the same: it is written once, and nothing read.
    places = np.empty(offsets[-1], np.int64)
    bounds = [*offsets[first].tolist(), len(places)]
    for low, high, length in zip(bounds[:-1], bounds[1:], lengths[first].tolist(), strict=True):
        if length:
            places[low:high].reshape(-1, length)[:] = np.arange(length)
    return places


def to_arrow(values: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """An Arrow array over the same memory; null where `valid` is false.

    `pa.array` does this too, but imports pandas where it is installed, which takes longer than preparing a book.
    """
    validity = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [validity, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def from_arrow(array: pa.Array) -> np.ndarray:
    """The numbers of an Arrow array without nulls, over the same memory and without pandas (see `to_arrow`)."""
    data = array.buffers()[1]
    dtype = np.dtype(str(array.type))
    if data is None:  # an array of nothing
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, count=len(array), offset=array.offset * dtype.itemsize)
