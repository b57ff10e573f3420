"""Global batches, and of each this rank's part, which alone it reads; the position in the stream is one integer."""

import math
import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.collate import collate, collate_several, without_loss
from cloze.pipeline.loading.order import Order, WindowPlace, window_order
from cloze.pipeline.records import NO_LABEL, Masks, Samples
from cloze.pipeline.samples.masking import DynamicMasking, RateSchedule
from cloze.pipeline.shards.shards import ShardReader, Window

_PREFETCHED = 4  # groups of batches
# Tokens that are taken at once, so that what a call costs in Python is small beside them: of each stream and in all
# when they are read, and made into tensors.
_TOKENS_OF_STREAM = 1 << 12
_TOKENS_READ = 1 << 17
_TOKENS_COLLATED = 1 << 18
_WINDOWS_AT_ONCE = 64  # decoded together: those of small data sets share blocks


@dataclass(frozen=True)
class BatchWarmup:
    """Global batches that grow from `initial` in steps of `increment`, as many samples apart each (as Megatron-LM's
    `rampup_batch_size`); from position `samples` on they have their final size.
    """

    initial: int
    increment: int
    samples: int

    def size(self, position: int, final: int) -> int:
        """Samples of the global batch that begins at `position`."""
        if position >= self.samples:
            return final
        return self.initial + self.increment * ((final - self.initial) // self.increment * position // self.samples)


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of one global batch.

    micro_batches: as many as accumulation steps, each what `collate` returns.
    position: samples consumed before this batch. epoch: of the batch's first sample. num_samples: of the global batch.
    num_tokens, num_masked, num_pairs (samples with a next-sentence label), num_padding (tokens that padding each
    micro-batch to its longest sample would add): of this rank's part, as is
    indices (n,): its samples by index, in the order of the micro-batches.
    """

    micro_batches: list[dict]
    position: int
    epoch: int
    num_samples: int
    num_tokens: int
    num_masked: int
    num_pairs: int
    num_padding: int
    indices: np.ndarray


def masks_per_sample(reader: ShardReader) -> DynamicMasking | None:
    """What draws masks at load time, or None if the shards hold them."""
    manifest = reader.manifest
    return None if manifest.mask_sets else DynamicMasking(manifest)


def deal(lengths: np.ndarray, micro_batch_size: int, rank: int, world_size: int) -> list[np.ndarray]:
    """Deal a global batch: rows (micro_batch_size,) of it for each micro-step of this rank.

    Sorted by length, so that at each micro-step all ranks hold similar lengths: little padding, no stragglers.
    """
    by_length = np.argsort(lengths, kind="stable")
    step = micro_batch_size * world_size
    return [by_length[start : start + step][rank::world_size] for start in range(0, len(lengths), step)]


@dataclass(frozen=True)
class _Loaded:
    """A window of a stream in its order, masks drawn: numbers [start, stop) of the stream."""

    start: int
    stop: int
    indices: np.ndarray
    samples: Samples
    masks: Masks


class SampleStreams:
    """The endless streams of samples that make up the order, of which any may be read from any number on.

    Epoch e uses pair set e mod P and mask set (e // P) mod K, or masks drawn for (seed, epoch, sample), at the rate
    that `masking_rate` has at the sample's position (None: the manifest's). Of each stream that is read the windows in
    use are held.
    """

    def __init__(self, reader: ShardReader, streams: int, seed: int, masking_rate: RateSchedule | None = None):
        if reader.num_samples == 0:
            raise UserError(f"{reader.folder}: found no samples in split {reader.split!r}; prepare more text")
        self.reader = reader
        self._seed = seed
        self._blocks = [reader.blocks_of_pair_set(number) for number in range(len(reader.epoch_sizes))]
        self.order = Order([reader.block_sizes[blocks] for blocks in self._blocks], reader.manifest.max_length, streams,
                           seed)
        self._dynamic = masks_per_sample(reader)
        self._masking_rate = masking_rate
        self._held: dict[int, list[_Loaded]] = {}

    def read(self, streams: range, position: int, count: int) -> tuple[np.ndarray, Samples, Masks]:
        """`count` samples of each of these streams from `position` on, stream after stream: indices, samples, masks."""
        firsts = [self.order.first_from(position, stream) for stream in streams]
        self._load(streams, firsts, count)
        pieces = [
            (window, max(first, window.start) - window.start, min(first + count, window.stop) - window.start)
            for stream, first in zip(streams, firsts, strict=True) for window in self._held[stream]
            if window.start < first + count
        ]
        return _joined(pieces)

    def _load(self, streams: range, firsts: list[int], count: int) -> None:
        """Hold of each stream the windows of `count` samples from its first on, and no earlier ones."""
        wanted: list[WindowPlace] = []
        held = {}
        for stream, first in zip(streams, firsts, strict=True):
            kept = [window for window in self._held.get(stream, ()) if window.stop > first]
            held[stream] = kept if kept and kept[0].start <= first else []
            number = held[stream][-1].stop if held[stream] else first
            while number < first + count:
                wanted.append(self.order.window(stream, number))
                number = wanted[-1].stop
        self._held = held
        for start in range(0, len(wanted), _WINDOWS_AT_ONCE):
            some = wanted[start : start + _WINDOWS_AT_ONCE]
            for epoch in sorted({place.epoch for place in some}):
                self._load_windows(epoch, [place for place in some if place.epoch == epoch])
        if wanted and self.reader.is_stored:
            self._fetch_ahead(sorted({place.stream for place in wanted}))

    def _fetch_ahead(self, streams: list[int]) -> None:
        """Begin to fetch the window of each stream that follows what is held."""
        for stream in streams:
            following = self.order.window(stream, self._held[stream][-1].stop)
            numbers, mask_set = self._stored_as(following.epoch)
            self.reader.fetch(numbers[following.blocks], mask_set)

    def _stored_as(self, epoch: int) -> tuple[np.ndarray, int | None]:
        """The blocks of an epoch's pair set, and its mask set."""
        pair_sets = len(self._blocks)
        mask_set = None if self._dynamic else epoch // pair_sets % self.reader.manifest.mask_sets
        return self._blocks[epoch % pair_sets], mask_set

    def _load_windows(self, epoch: int, places: list[WindowPlace]) -> None:
        numbers, mask_set = self._stored_as(epoch)
        blocks = np.unique(np.concatenate([numbers[place.blocks] for place in places]))  # each is decoded once
        decoded = self.reader.window(blocks, mask_set)
        starts = ragged.to_offsets(self.reader.block_sizes[blocks])
        for place in places:
            own = numbers[place.blocks]
            sizes = self.reader.block_sizes[own]
            part = slice(place.skip, place.skip + place.stop - place.start)
            rows = ragged.ranges(starts[np.searchsorted(blocks, own)], sizes)[part]
            indices = ragged.ranges(self.reader.block_starts[own], sizes)[part]
            lengths = decoded.samples.offsets[rows + 1] - decoded.samples.offsets[rows]
            order = window_order(lengths, self._seed, epoch, place.stream, place.number)
            samples, masks = decoded.take(rows[order])
            if self._dynamic:
                positions = np.arange(place.start, place.stop) * self.order.streams + place.stream
                rates = self._masking_rate and self._masking_rate.at(positions)
                masks = self._dynamic.draw(samples, self._seed, epoch, indices[order], rates)
            self._held[place.stream].append(_Loaded(place.start, place.stop, indices[order], samples, masks))


def _joined(pieces: list[tuple[_Loaded, int, int]]) -> tuple[np.ndarray, Samples, Masks]:
    """Samples [low, high) of each window, one after another: indices, samples, masks."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(window.samples, name)[low:high] for window, low, high in pieces])

    def flat(values: list[np.ndarray], offsets: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([some[part[0] : part[-1]] for some, part in zip(values, offsets, strict=True)])

    def counts(offsets: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([part[1:] - part[:-1] for part in offsets])

    offsets = [window.samples.offsets[low : high + 1] for window, low, high in pieces]
    masked = [window.masks.offsets[low : high + 1] for window, low, high in pieces]
    samples = Samples(
        input_ids=flat([window.samples.input_ids for window, *_ in pieces], offsets),
        offsets=ragged.to_offsets(counts(offsets)),
        segment_b_start=column("segment_b_start"),
        next_sentence_label=column("next_sentence_label"),
        document=column("document"),
        source=column("source"),
    )
    masks = Masks(
        positions=flat([window.masks.positions for window, *_ in pieces], masked),
        ids=flat([window.masks.ids for window, *_ in pieces], masked),
        offsets=ragged.to_offsets(counts(masked)),
    )
    return np.concatenate([window.indices[low:high] for window, low, high in pieces]), samples, masks


class BatchStream:
    """Iterator over global batches from `samples_consumed` on; it makes this rank's part of each.

    Of a global batch of G samples, in the order of streams, a rank has [rank · G / world_size, (rank + 1) · G /
    world_size): those of its own streams, and reads no others; only where the world size doesn't divide `streams` some
    are read by two. So a global batch holds the same samples for any number of ranks, also while `warmup` lets it grow.
    `segments`: as in `collate`. `masking_rate`: of masks that are drawn at load time. A thread prefetches; `close` ends
    it.
    Raises UserError if a batch size isn't a multiple of micro_batch_size × world_size, or of `streams`.
    """

    def __init__(
        self,
        reader: ShardReader,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        streams: int,
        seed: int,
        samples_consumed: int = 0,
        warmup: BatchWarmup | None = None,
        segments: tuple[int, int] = (0, 1),
        masking_rate: RateSchedule | None = None,
    ):
        at_once = micro_batch_size * world_size
        for size in [global_batch_size, *([warmup.initial, warmup.increment] if warmup else [])]:
            if size % at_once:
                raise UserError(
                    f"global_batch_size: found {size}, expected a multiple of micro_batch_size "
                    f"{micro_batch_size} × processes {world_size} = {at_once}; change one of them"
                )
            if size % streams:
                raise UserError(f"data_streams: found {streams}, expected a divisor of the global batch size {size}")
        self._samples = SampleStreams(reader, streams, seed, masking_rate)
        self._size, self._micro, self._warmup = global_batch_size, micro_batch_size, warmup
        self._segments = segments
        self._rank, self._world_size = rank, world_size
        self._streams = range(rank * streams // world_size, -(-(rank + 1) * streams // world_size))
        mean = reader.mean_length
        rows = max(_TOKENS_OF_STREAM / mean, _TOKENS_READ / (mean * len(self._streams)))
        self._rows = min(rows, reader.num_samples / streams)  # small data is read an epoch at a time
        self._together = max(1, int(_TOKENS_COLLATED / (mean * global_batch_size / world_size)))
        self._ready: deque[RankBatch] = deque()
        self._queue: queue.Queue = queue.Queue(_PREFETCHED)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._prefetch, args=(samples_consumed,), daemon=True)
        self._thread.start()

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> RankBatch:
        if self._closed.is_set():
            raise StopIteration
        if not self._ready:
            item = self._queue.get()
            if isinstance(item, BaseException):
                self.close()
                raise item
            self._ready.extend(item)
        return self._ready.popleft()

    def close(self) -> None:
        """End the prefetching thread; what it holds is dropped."""
        self._closed.set()
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=60)
        self._samples.reader.cancel()

    def _prefetch(self, position: int) -> None:
        try:
            while not self._closed.is_set():
                sizes = self._sizes(position)
                read = self._samples.read(self._streams, position, sum(sizes) // self._samples.order.streams)
                for batches in self._groups(position, sizes, read):
                    if not self._put(batches):
                        return
                position += sum(sizes)
        except BaseException as error:  # handed to the consumer: a failure of the thread is the job's failure
            self._put(error)

    def _put(self, item) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _sizes(self, position: int) -> list[int]:
        """Global batches that are read together, by their samples."""
        sizes = []
        while sum(sizes) < self._rows * self._samples.order.streams:
            at = position + sum(sizes)
            sizes.append(self._warmup.size(at, self._size) if self._warmup else self._size)
        return sizes

    def _groups(self, position: int, sizes: list[int], read: tuple[np.ndarray, Samples, Masks]) -> Iterator[list]:
        """The batches that were read, in groups of equal ones that become tensors together."""
        done, total = 0, sum(sizes)
        while sizes:
            alike = next((place for place, size in enumerate(sizes) if size != sizes[0]), len(sizes))
            count, size = min(alike, self._together), sizes[0]
            yield self._make(position + done, size, count, done, total, read)
            done, sizes = done + count * size, sizes[count:]

    def _make(self, position: int, size: int, count: int, done: int, total: int, read) -> list[RankBatch]:
        """`count` batches of `size` samples from `position` on, of global batches of `total` samples that were read
        together, of which `done` came before them."""
        indices, samples, masks = read
        each, row, rows = (number // self._samples.order.streams for number in (size, done, total))  # in each stream
        own = np.arange(self._rank * size // self._world_size, (self._rank + 1) * size // self._world_size)
        stream, place = np.divmod(own - self._streams.start * each, each)
        first = row + each * np.arange(count)[:, None]
        chosen = stream * rows + place + first  # (count, own): one batch a line
        by_length = np.argsort(samples.lengths[chosen], axis=1, kind="stable")
        chosen = np.take_along_axis(chosen, by_length, axis=1)
        micro_steps = len(own) // self._micro
        part, part_masks = Window(samples, masks).take(chosen.ravel())
        made = collate_several(part, part_masks, np.full(count * micro_steps, self._micro), self._segments)
        lengths = part.lengths.reshape(count, micro_steps, self._micro)
        tokens = lengths.sum(axis=(1, 2))
        padding = (lengths[:, :, -1] * self._micro).sum(axis=1) - tokens  # the last is the longest
        masked = np.diff(part_masks.offsets[:: len(own)])
        pairs = (part.next_sentence_label.reshape(count, -1) != NO_LABEL).sum(axis=1)
        columns = zip(tokens.tolist(), masked.tolist(), pairs.tolist(), padding.tolist(), indices[chosen], strict=True)
        return [
            RankBatch(made[number * micro_steps : (number + 1) * micro_steps], position + number * size,
                      self._samples.order.epoch_of(position + number * size), size, *values)
            for number, values in enumerate(columns)
        ]


def evaluation_batches(
    reader: ShardReader,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    mask_set: int = 0,
    max_samples: int | None = None,
    segments: tuple[int, int] = (0, 1),
) -> Iterator[dict]:
    """Every sample (or the first `max_samples`) exactly once over all ranks, with the same masks every time.

    A rank reads one stretch of them. Every rank gets the same number of micro-batches: one that has no sample left gets
    a filler whose labels are all -100.
    """
    dynamic = masks_per_sample(reader)
    total = reader.num_samples if max_samples is None else min(max_samples, reader.num_samples)
    low, high = rank * total // world_size, (rank + 1) * total // world_size
    steps = math.ceil(math.ceil(total / world_size) / micro_batch_size)  # of the longest stretch
    at_once = micro_batch_size * max(1, int(_TOKENS_READ / (reader.mean_length * micro_batch_size)))
    made = 0
    for start in range(low, high, at_once):
        indices = np.arange(start, min(start + at_once, high))
        samples, masks = reader.take(indices, None if dynamic else mask_set)
        if dynamic:
            masks = dynamic.draw(samples, 0, mask_set, indices)
        for first in range(0, len(indices), micro_batch_size):
            rows = np.arange(first, min(first + micro_batch_size, len(indices)))
            by_length = rows[np.argsort(samples.lengths[rows], kind="stable")]
            yield collate(*Window(samples, masks).take(by_length), segments)
            made += 1
    if made < steps:
        filler, masks = reader.take(np.zeros(1, np.int64), None if dynamic else mask_set)
        if dynamic:
            masks = dynamic.draw(filler, 0, mask_set, np.zeros(1, np.int64))
        for _ in range(steps - made):
            yield without_loss(collate(filler, masks, segments))
