"""The order as one table: what the streams of samples are compared with, worked out row by row."""

import numpy as np

from cloze.pipeline.loading import order


def positions(block_sizes, lengths: np.ndarray, max_length: int, streams: int, seed: int, epochs: int) -> np.ndarray:
    """The sample at each position of the first epochs, int64. lengths: of all samples."""
    firsts = np.cumsum([0, *block_sizes]).tolist()
    size = firsts[-1]
    found = np.full(size * epochs, -1)
    least = max(1, order.WINDOW_TOKENS // (max_length * streams))  # rows of a window
    for epoch in range(epochs):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 1, epoch))))
        blocks = generator.permutation(len(block_sizes)).tolist()
        line = [(block, row) for block in blocks for row in range(firsts[block], firsts[block + 1])]
        for stream in range(streams):
            own = [position for position in range(epoch * size, (epoch + 1) * size) if position % streams == stream]
            segment, line = line[: len(own)], line[len(own) :]
            windows, wanted = [[]], least
            for place, (block, row) in enumerate(segment):
                if place and block != segment[place - 1][0] and place >= wanted:  # a bound, past the next multiple
                    windows.append([])
                    wanted = (place // least + 1) * least
                windows[-1].append(row)
            rows = [
                np.array(w)[order.window_order(lengths[w], seed, epoch, stream, n)] for n, w in enumerate(windows) if w
            ]
            found[own] = np.concatenate([np.empty(0, np.int64), *rows])
        assert not line
    return found
