"""Global batches, and of each this rank's part; the position in the stream is one integer."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading import order
from cloze.pipeline.loading.collate import collate, without_loss
from cloze.pipeline.records import NO_LABEL, Masks, Samples
from cloze.pipeline.samples.masking import DynamicMasking, RateSchedule
from cloze.pipeline.shards.shards import ShardReader, Window

_PREFETCHED_BATCHES = 4


@dataclass(frozen=True)
class BatchWarmup:
    """Global batches that grow from `initial` in steps of `increment`, as many real tokens apart each (as Megatron-LM's
    `rampup_batch_size`, which counts samples); from `tokens` tokens on they have their final size.
    """

    initial: int
    increment: int
    tokens: int

    def size(self, tokens: int, final: int) -> int:
        """Samples of the global batch after `tokens` real tokens."""
        if tokens >= self.tokens:
            return final
        return self.initial + self.increment * ((final - self.initial) // self.increment * tokens // self.tokens)


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of one global batch.

    micro_batches: as many as accumulation steps, each what `collate` returns.
    position: samples consumed before this batch. epoch: of the batch's first sample.
    num_samples, global_tokens (real ones): of the global batch, over all ranks. indices (num_samples,): the samples of
    the global batch, by index.
    num_tokens, num_masked, num_pairs (samples with a next-sentence label), num_padding (tokens that padding each
    micro-batch to its longest sample would add): of this rank's part.
    """

    micro_batches: list[dict]
    position: int
    epoch: int
    num_samples: int
    global_tokens: int
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


class SampleStream:
    """The endless stream of samples, epoch after epoch, read from any position.

    Epoch e uses pair set e mod P and mask set (e // P) mod K, or masks drawn for (seed, epoch, sample), at the rate
    that `masking_rate` has at the sample's position (None: the manifest's).
    """

    def __init__(self, reader: ShardReader, seed: int, masking_rate: RateSchedule | None = None):
        if reader.num_samples == 0:
            raise UserError(f"{reader.folder}: found no samples in split {reader.split!r}; prepare more text")
        self.reader = reader
        self.seed = seed
        self.epoch_sizes = reader.epoch_sizes
        self._dynamic = masks_per_sample(reader)
        self._masking_rate = masking_rate
        self._windows: dict[tuple[int, int], tuple[Window, np.ndarray]] = {}
        self._plans: dict[int, tuple[np.ndarray, list[np.ndarray], np.ndarray]] = {}

    def read(self, position: int, count: int) -> list[tuple[int, np.ndarray, Samples, Masks]]:
        """`count` samples from `position`, in parts that lie in one window: (epoch, indices, samples, masks)."""
        parts = []
        while count:
            epoch, offset = order.locate(position, self.epoch_sizes)
            _, _, window_offsets = self._plan(epoch)
            number = int(np.searchsorted(window_offsets, offset, side="right")) - 1
            take = min(count, int(window_offsets[number + 1]) - offset)
            window, rows, indices = self._window(epoch, number)
            low = offset - int(window_offsets[number])
            samples, masks = window.take(rows[low : low + take])
            if self._dynamic:
                rates = self._masking_rate and self._masking_rate.at(np.arange(position, position + take))
                masks = self._dynamic.draw(samples, self.seed, epoch, indices[low : low + take], rates)
            parts.append((epoch, indices[low : low + take], samples, masks))
            position, count = position + take, count - take
        return parts

    def _plan(self, epoch: int):
        if epoch not in self._plans:
            blocks = self.reader.blocks_of_pair_set(epoch % len(self.epoch_sizes))
            windows, offsets = order.epoch_windows(
                self.reader.block_sizes[blocks], self.reader.manifest.max_length, self.seed, epoch
            )
            self._plans = {key: plan for key, plan in self._plans.items() if key == epoch - 1}
            self._plans[epoch] = (blocks, windows, offsets)
        return self._plans[epoch]

    def _window(self, epoch: int, number: int) -> tuple[Window, np.ndarray, np.ndarray]:
        key = (epoch, number)
        if key not in self._windows:
            blocks, windows, _ = self._plan(epoch)
            chosen = blocks[windows[number]]
            mask_set = None
            if not self._dynamic:
                mask_set = epoch // len(self.epoch_sizes) % self.reader.manifest.mask_sets
            self._windows.clear()  # at most one window is held: neighbouring positions share it
            window = self.reader.window(chosen, mask_set)
            sizes = self.reader.block_sizes[chosen]
            rows = order.row_order(int(sizes.sum()), self.seed, epoch, number)
            indices = ragged.ranges(self.reader.block_starts[chosen], sizes)[rows]
            self._windows[key] = (window, rows, indices)
        return self._windows[key]


class BatchStream:
    """Iterator over global batches from `samples_consumed` on; it makes this rank's part of each.

    A global batch holds the same samples for any number of ranks, also while `warmup` lets it grow: every rank reads
    the whole of it, so that the tokens so far, which decide its size, are known without asking the others.
    `tokens_consumed`: real tokens before `samples_consumed`. `segments`: as in `collate`. `masking_rate`: of masks that
    are drawn at load time. A thread prefetches; `close` ends it.
    Raises UserError if a batch size isn't a multiple of micro_batch_size × world_size.
    """

    def __init__(
        self,
        reader: ShardReader,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        samples_consumed: int = 0,
        tokens_consumed: int = 0,
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
        self._stream = SampleStream(reader, seed, masking_rate)
        self._size, self._micro, self._warmup = global_batch_size, micro_batch_size, warmup
        self._segments = segments
        self._rank, self._world_size = rank, world_size
        self._queue: queue.Queue = queue.Queue(_PREFETCHED_BATCHES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._prefetch, args=(samples_consumed, tokens_consumed), daemon=True)
        self._thread.start()

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> RankBatch:
        if self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """End the prefetching thread; what it holds is dropped."""
        self._closed.set()
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=60)

    def _prefetch(self, position: int, tokens: int) -> None:
        try:
            while not self._closed.is_set():
                size = self._warmup.size(tokens, self._size) if self._warmup else self._size
                batch = self._make(position, size)
                if not self._put(batch):
                    return
                position, tokens = position + size, tokens + batch.global_tokens
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

    def _make(self, position: int, size: int) -> RankBatch:
        parts = self._stream.read(position, size)
        epochs, indices, samples, masks = zip(*parts, strict=True)
        indices, samples, masks = np.concatenate(indices), Samples.joined(samples), Masks.joined(masks)
        whole = Window(samples, masks)
        rows = deal(samples.lengths, self._micro, self._rank, self._world_size)
        micro_batches, padding = [], 0
        for chosen in rows:
            part, part_masks = whole.take(chosen)
            padding += len(part) * int(part.lengths.max()) - len(part.input_ids)
            micro_batches.append(collate(part, part_masks, self._segments))
        mine = np.concatenate(rows)
        return RankBatch(
            micro_batches=micro_batches,
            position=position,
            epoch=epochs[0],
            num_samples=size,
            global_tokens=len(samples.input_ids),
            num_tokens=int(samples.lengths[mine].sum()),
            num_masked=int(np.diff(masks.offsets)[mine].sum()),
            num_pairs=int((samples.next_sentence_label[mine] != NO_LABEL).sum()),
            num_padding=padding,
            indices=indices,
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
) -> Iterator[dict]:
    """Every sample (or the first `max_samples`) exactly once over all ranks, with the same masks every time.

    Every rank gets the same number of micro-batches: one that has no sample left gets a filler whose labels are
    all -100.
    """
    dynamic = masks_per_sample(reader)
    count = reader.num_samples if max_samples is None else min(max_samples, reader.num_samples)
    step = micro_batch_size * world_size
    for start in range(0, count, step):
        indices = np.arange(start, min(start + step, count))
        samples, masks = reader.take(indices, None if dynamic else mask_set)
        if dynamic:
            masks = dynamic.draw(samples, 0, mask_set, indices)
        (mine,) = deal(samples.lengths, micro_batch_size, rank, world_size)
        filler = len(mine) == 0
        batch = collate(*Window(samples, masks).take(np.zeros(1, np.int64) if filler else mine), segments)
        yield without_loss(batch) if filler else batch
