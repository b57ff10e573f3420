"""Global batches and the order of a rank's samples in them: each rank reads its own part only, sorted by length; the
position in the stream is one integer."""

import bisect
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.loading.collate import collate, collate_several, without_loss
from cloze.pipeline.loading.order import derived_seed
from cloze.pipeline.loading.streams import (
    MixedStreams,
    Mixture,
    Portion,
    RunMasking,
    SampleStreams,
    masks_per_sample,
    take_masked,
)
from cloze.pipeline.records import NO_LABEL
from cloze.pipeline.samples.masking import KeyedDraws
from cloze.pipeline.shards.reader import ShardReader, ShardWindow

_PREFETCHED = 4  # groups of batches that are prefetched
_CLOSE_SECONDS = 60  # to wait for what is being read: a store may not answer
# Tokens that are taken at once, so that what a call costs in Python is small beside them: of each stream and in all
# when they are read, and made into tensors.
_TOKENS_OF_STREAM = 1 << 13
_TOKENS_READ = 1 << 17
_TOKENS_COLLATED = 1 << 18
_KINDS = 4  # purpose of the draw of which samples are causal (order.py and streams.py have others)


@dataclass(frozen=True)
class BatchPhases:
    """Global batches of `sizes` samples one after another, each up to the position `ends` of it; then of their final
    size. A batch that begins before an end goes on over it.
    """

    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    def size(self, position: int, final: int) -> int:
        """Size of the global batch that begins at `position`."""
        return (*self.sizes, final)[bisect.bisect_right(self.ends, position)]

    def samples(self, batches: int, final: int) -> int:
        """Samples of the first `batches` global batches."""
        position = 0
        for size, end in zip(self.sizes, self.ends, strict=True):
            count = min(batches, max(0, -(-(end - position) // size)))
            position, batches = position + count * size, batches - count
        return position + batches * final


def growing_batches(initial: int, increment: int, samples: int, final: int) -> BatchPhases:
    """Global batches that grow from `initial` to `final` by `increment` at equal intervals of `samples` samples in all
    (Megatron-LM's `rampup_batch_size`).
    """
    sizes = range(initial, final, increment)
    return BatchPhases(tuple(sizes), tuple(-(-samples * number // len(sizes)) for number in range(1, len(sizes) + 1)))


def _drawn(share: Fraction, seed: int, positions: np.ndarray) -> np.ndarray:
    """Which of the positions (n,), in whole groups of the share's denominator, are drawn, bool (n,): of each group as
    many as its numerator says. A fixed pattern would go with the lengths, which alternate (`window_order`).
    """
    seed = derived_seed(seed, _KINDS)
    numbers = KeyedDraws(seed, 0, positions).uniform(np.arange(len(positions)), 0).reshape(-1, share.denominator)
    drawn = np.zeros(numbers.shape, bool)
    np.put_along_axis(drawn, numbers.argsort(axis=1, kind="stable")[:, : share.numerator], True, axis=1)
    return drawn.ravel()


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of one global batch.

    num_tokens, num_masked (tokens that are predicted), num_pairs (samples with a next-sentence label), num_padding
    (tokens that padding each micro-batch to its longest sample would add): of this rank's part, as is indices (n,): its
    samples by index, in the order of the micro-batches.

    Args:
        micro_batches: as many as accumulation steps, each what `collate` returns; those with next tokens first.
        position: samples consumed before this batch.
        epoch: of the batch's first sample.
        num_samples: of the global batch.
        sources: of a mixture, for each micro-batch the places of its samples' sources, int64 (micro_batch_size,); None:
            there is one source.
    """

    micro_batches: list[MicroBatch]
    position: int
    epoch: int
    num_samples: int
    num_tokens: int
    num_masked: int
    num_pairs: int
    num_padding: int
    indices: np.ndarray
    sources: Sequence[torch.Tensor] | None = None


class BatchStream:
    """Iterator over global batches from `samples_consumed` on; it makes this rank's part of each.

    Of a global batch of G samples, in the order of streams, a rank has [rank · G / world_size, (rank + 1) · G /
    world_size): those of its own streams; it reads no others (some streams are read by two ranks if the world size
    doesn't divide `streams`). A global batch thus has the same samples at any world size, also while `warmup` changes
    its size. In a mixture each source has its share of a global batch, within one sample per `streams` samples. A
    thread prefetches; `close` ends it.

    Args:
        segments: as in `collate`.
        masking: rates of masks drawn at load time, and where next tokens are predicted.

    Raises:
        UserError: naming the argument, for a value below its minimum, and if a batch size isn't a multiple of
            micro_batch_size × world_size, or of `streams`; with a causal share, also if either part of one isn't.
    """

    def __init__(
        self,
        reader: ShardReader | Mixture,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        streams: int,
        seed: int,
        samples_consumed: int = 0,
        warmup: BatchPhases | None = None,
        segments: tuple[int, int] = (0, 1),
        masking: RunMasking | None = None,
    ):
        sizes = {
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "world_size": world_size,
            "streams": streams,
        }
        for name, value, least in (
            *((name, value, 1) for name, value in sizes.items()),
            ("seed", seed, 0),
            ("samples_consumed", samples_consumed, 0),
        ):
            if value < least:
                raise UserError(f"{name}: found {value}, expected a whole number, at least {least}")
        if not 0 <= rank < world_size:
            raise UserError(f"rank: found {rank} of {world_size} processes, expected 0 to {world_size - 1}")
        at_once = micro_batch_size * world_size
        for size in [global_batch_size, *(warmup.sizes if warmup else ())]:
            if size % at_once:
                raise UserError(
                    f"global_batch_size: found {size}, expected a multiple of micro_batch_size "
                    f"{micro_batch_size} × processes {world_size} = {at_once}; change one of them"
                )
            if size % streams:
                raise UserError(f"data_streams: found {streams}, expected a divisor of the global batch size {size}")
            if masking and masking.causal_share * size % at_once:
                raise UserError(
                    f"causal_share: found {masking.causal_share} of {size} samples, expected a multiple of "
                    f"micro_batch_size {micro_batch_size} × processes {world_size} = {at_once}; change one of them"
                )
        self._samples: MixedStreams | SampleStreams = (
            MixedStreams(reader, streams, seed, masking)
            if isinstance(reader, Mixture)
            else SampleStreams(reader, streams, seed, masking)
        )
        self._size, self._micro, self._warmup = global_batch_size, micro_batch_size, warmup
        self._segments = segments
        self._seed, self._masking = seed, masking or RunMasking()
        self._rank, self._world_size = rank, world_size
        self._streams = range(rank * streams // world_size, -(-(rank + 1) * streams // world_size))
        mean = reader.mean_length
        rows = max(_TOKENS_OF_STREAM / mean, _TOKENS_READ / (mean * len(self._streams)))
        self._rows = min(rows, reader.num_samples / streams)  # small data is read one epoch at a time
        self._together = max(1, int(_TOKENS_COLLATED / (mean * global_batch_size / world_size)))
        self._ready: deque[RankBatch] = deque()
        self._source = self._groups_from(samples_consumed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cloze-batches")
        self._ahead = deque(self._thread.submit(next, self._source) for _ in range(_PREFETCHED))

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> RankBatch:
        if not self._ready:
            if not self._ahead:  # closed
                raise StopIteration
            try:
                self._ready.extend(self._ahead.popleft().result())
            except BaseException:
                self.close()
                raise
            self._ahead.append(self._thread.submit(next, self._source))
        return self._ready.popleft()

    def close(self) -> None:
        """End the prefetching thread and drop its batches."""
        wait([group for group in self._ahead if not group.cancel()], timeout=_CLOSE_SECONDS)
        self._ready.clear()
        self._ahead.clear()
        self._thread.shutdown(wait=False)
        self._samples.cancel()

    def _groups_from(self, position: int) -> Iterator[list[RankBatch]]:
        """The batches from `position` on, in groups."""
        while True:
            sizes = self._sizes(position)
            read = self._samples.read(self._streams, position, sum(sizes) // self._samples.streams)
            yield from self._groups(position, sizes, read)
            position += sum(sizes)

    def _sizes(self, position: int) -> list[int]:
        """Sizes of the global batches that are read together."""
        sizes: list[int] = []
        while sum(sizes) < self._rows * self._samples.streams:
            at = position + sum(sizes)
            sizes.append(self._warmup.size(at, self._size) if self._warmup else self._size)
        return sizes

    def _groups(self, position: int, sizes: list[int], read: Portion) -> Iterator[list[RankBatch]]:
        """The batches that were read, in groups that are converted to tensors together: of one size, and all of next
        tokens or none.
        """
        done, total = 0, sum(sizes)
        while sizes:
            alike = next((place for place, size in enumerate(sizes) if size != sizes[0]), len(sizes))
            count, size = min(alike, self._together), sizes[0]
            if (left := self._masking.next_tokens_until - position - done) > 0:
                count = min(count, -(-left // size))
            yield self._make(position + done, size, count, done, total, read)
            done, sizes = done + count * size, sizes[count:]

    def _make(self, position: int, size: int, count: int, done: int, total: int, read: Portion) -> list[RankBatch]:
        """Make `count` batches of `size` samples from `position` on, out of `total` samples that were read together, of
        which `done` were used.
        """
        # samples per stream
        per_stream, row, length = (number // self._samples.streams for number in (size, done, total))
        own = np.arange(self._rank * size // self._world_size, (self._rank + 1) * size // self._world_size)
        stream, place = np.divmod(own - self._streams.start * per_stream, per_stream)
        first = row + per_stream * np.arange(count)[:, None]
        chosen = stream * length + place + first  # (count, own): one batch a line
        rows = chosen if read.rows is None else read.rows[chosen]
        lengths = read.samples.lengths.astype(np.uint16)  # as in `window_order`
        by_length = np.argsort(lengths[rows], axis=1, kind="stable")
        share = self._masking.causal_at(position)
        causal = int(share * len(own))
        if 0 < share < 1:
            positions = position + size * np.arange(count)[:, None] + own
            first = _drawn(share, self._seed, positions.ravel()).reshape(positions.shape)
            kinds = np.argsort(~np.take_along_axis(first, by_length, axis=1), axis=1, kind="stable")
            by_length = np.take_along_axis(by_length, kinds, axis=1)
        rows = np.take_along_axis(rows, by_length, axis=1)
        micro_steps = len(own) // self._micro
        made = [
            self._collated(read, part, next_tokens)
            for part, next_tokens in ((rows[:, :causal], True), (rows[:, causal:], False))
            if part.size
        ]
        epochs = self._samples.epochs(position + size * np.arange(count))
        sources: list[Sequence[torch.Tensor] | None] = [None] * count
        if read.sources is not None:
            places = np.take_along_axis(read.sources[chosen], by_length, axis=1).ravel().astype(np.int64)
            split = torch.from_numpy(places).split(self._micro)
            sources = [split[first : first + micro_steps] for first in range(0, len(split), micro_steps)]
        counts = np.sum([some for _, some in made], axis=0).tolist()
        return [
            RankBatch(
                [micro_batch for batches, _ in made for micro_batch in batches[number]],
                position + number * size,
                epoch,
                size,
                *values,
            )
            for number, (epoch, *values) in enumerate(zip(epochs, *counts, read.indices[rows], sources, strict=True))
        ]

    def _collated(self, read: Portion, rows: np.ndarray, next_tokens: bool) -> tuple[list[list[Fields]], np.ndarray]:
        """Micro-batches of samples of one kind, (count, n) rows of what was read, a list for each of `count` batches;
        and int64 (4, count): tokens, tokens that are predicted, pairs, padding.
        """
        count, samples = rows.shape
        part, part_masks = ShardWindow(read.samples, read.masks).take(rows.ravel())
        sizes = np.full(rows.size // self._micro, self._micro)
        micro_batches = collate_several(part, part_masks, sizes, self._segments, next_tokens)
        lengths = part.lengths.reshape(count, -1, self._micro)
        tokens = lengths.sum(axis=(1, 2))
        # sorted by length: the last one is the longest
        padding = (lengths[:, :, -1] * self._micro).sum(axis=1) - tokens
        if next_tokens:
            masked, pairs = tokens - samples, np.zeros_like(tokens)
        else:
            masked = np.diff(part_masks.offsets[::samples])
            pairs = (part.next_sentence_label.reshape(count, -1) != NO_LABEL).sum(axis=1)
        steps = lengths.shape[1]
        return [micro_batches[first : first + steps] for first in range(0, count * steps, steps)], np.stack(
            [tokens, masked, pairs, padding]
        )


def evaluation_batches(
    reader: ShardReader,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    mask_set: int = 0,
    max_samples: int | None = None,
    segments: tuple[int, int] = (0, 1),
    rate: float | None = None,
) -> Iterator[Fields]:
    """Every sample (or the first `max_samples`) exactly once over all ranks, with the same masks every time; masks
    drawn at load time have this masking rate (None: the manifest's).

    A rank reads a contiguous range. Every rank gets the same number of micro-batches: a rank without samples gets
    filler batches whose labels are all -100.
    """
    dynamic = masks_per_sample(reader)
    total = reader.num_samples if max_samples is None else min(max_samples, reader.num_samples)
    low, high = rank * total // world_size, (rank + 1) * total // world_size
    steps = math.ceil(math.ceil(total / world_size) / micro_batch_size)  # micro-batches of the longest range
    at_once = micro_batch_size * max(1, int(_TOKENS_READ / (reader.mean_length * micro_batch_size)))
    yielded = 0
    for start in range(low, high, at_once):
        indices = np.arange(start, min(start + at_once, high))
        rates = None if rate is None else np.full(len(indices), rate)
        samples, masks = take_masked(reader, dynamic, indices, mask_set, 0, rates)
        for first in range(0, len(indices), micro_batch_size):
            rows = np.arange(first, min(first + micro_batch_size, len(indices)))
            by_length = rows[np.argsort(samples.lengths[rows], kind="stable")]
            part, part_masks = ShardWindow(samples, masks).take(by_length)
            yield collate(part, part_masks, segments)
            yielded += 1
    if yielded < steps:
        filler, masks = take_masked(reader, dynamic, np.zeros(1, np.int64), mask_set, 0)
        for _ in range(steps - yielded):
            yield without_loss(collate(filler, masks, segments))
