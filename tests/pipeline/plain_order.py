"""An epoch's order as one array: what the stream of batches is compared with."""

import numpy as np

from cloze.pipeline.loading import order


def epoch_indices(
    block_sizes: np.ndarray, max_length: int, seed: int, epoch: int, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Sample indices at places [start, stop) of an epoch, int64; by default all of them, which is a permutation."""
    block_sizes = np.asarray(block_sizes, np.int64)
    first = np.concatenate([[0], np.cumsum(block_sizes)])
    windows, offsets = order.epoch_windows(block_sizes, max_length, seed, epoch)
    stop = int(offsets[-1]) if stop is None else stop
    parts = [np.empty(0, np.int64)]
    for window, blocks in enumerate(windows):
        low, high = max(start, offsets[window]), min(stop, offsets[window + 1])
        if low < high:
            rows = np.concatenate([np.arange(first[block], first[block + 1]) for block in blocks])
            rows = rows[order.row_order(len(rows), seed, epoch, window)]
            parts.append(rows[low - offsets[window] : high - offsets[window]])
    return np.concatenate(parts)
