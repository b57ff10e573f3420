"""Streams of samples, read in windows and masked, from one prepared folder or a mixture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.mixture import MixtureOrder, Phase
from cloze.pipeline.loading.order import Order, WindowPlace, derived_seed, first_from, window_order
from cloze.pipeline.records import Masks, Samples
from cloze.pipeline.samples.masking import DynamicMasking, RatePhases, RateSchedule
from cloze.pipeline.shards.reader import ShardReader

_WINDOWS_AT_ONCE = 64  # windows decoded together: in small data sets they share blocks
_SOURCE = 3  # purpose of the draw of a source's seed (order.py has others)


@dataclass(frozen=True)
class RunMasking:
    """A run's settings for masks drawn at load time; None: those of the manifest. Stored masks are not changed.

    Args:
        rate: masking rate by the position in the stream of samples.
        strategy: token, whole_word or span.
        next_tokens_until: position up to which next tokens are predicted instead of masked ones; 0 with a causal
            share: the whole run.
        causal_share: share of each global batch's samples of which next tokens are predicted; 0: all up to there.
    """

    rate: RateSchedule | RatePhases | None = None
    strategy: str | None = None
    next_tokens_until: int = 0
    causal_share: Fraction = Fraction(0)

    def causal_at(self, position: int) -> Fraction:
        """Share of the samples of the global batch at a position whose next tokens are predicted."""
        if self.next_tokens_until:
            return (self.causal_share or Fraction(1)) if position < self.next_tokens_until else Fraction(0)
        return self.causal_share

    def mean_causal_share(self, samples: int) -> float:
        """Mean of `causal_at` over a run of so many samples."""
        until = min(self.next_tokens_until, samples)
        return float(self.causal_at(0)) * (until / samples if until else 1.0)


def masks_per_sample(reader: ShardReader, strategy: str | None = None) -> DynamicMasking | None:
    """The DynamicMasking that draws masks at load time, or None if the shards hold masks."""
    manifest = reader.manifest
    return None if manifest.mask_sets else DynamicMasking(manifest, strategy)


def take_masked(
    reader: ShardReader,
    dynamic: DynamicMasking | None,
    indices: np.ndarray,
    mask_set: int,
    seed: int,
    rates: np.ndarray | None = None,
) -> tuple[Samples, Masks]:
    """Samples by index (B,) with a mask set of the shards, or with the masks that `dynamic` draws for (seed, epoch
    `mask_set`, sample).
    """
    samples, stored = reader.take(indices, None if dynamic else mask_set)
    return samples, dynamic.draw(samples, seed, mask_set, indices, rates) if dynamic else stored


@dataclass(frozen=True)
class Portion:
    """Samples of some streams, the same number of each, and their masks.

    indices (N,): numbers of the samples in their source. rows (N,): indices into samples, masks and indices that give
    the order of the streams, stream after stream; None: they are in this order. sources (N,): index of each row's
    source in the mixture; None: there is one source.
    """

    indices: np.ndarray
    samples: Samples
    masks: Masks
    rows: np.ndarray | None = None
    sources: np.ndarray | None = None


@dataclass(frozen=True)
class _Loaded:
    """A permuted window of a stream with its masks: numbers [start, stop) of the stream."""

    start: int
    stop: int
    indices: np.ndarray
    samples: Samples
    masks: Masks


class SampleStreams:
    """The endless streams of samples of the order; each can be read from any number on.

    Epoch e uses pair set e mod P and mask set (e // P) mod K, or masks drawn for (seed, epoch, sample) by `masking`.
    Only the current windows of the streams that are read are held in memory.

    Args:
        positions: (stream, numbers (n,)) -> positions in the run's stream of samples; None: these streams are the run's
            own.
    """

    def __init__(
        self,
        reader: ShardReader,
        streams: int,
        seed: int,
        masking: RunMasking | None = None,
        positions: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ):
        if reader.num_samples == 0:
            raise UserError(f"{reader.folder}: found no samples in split {reader.split!r}; prepare more text")
        self.reader = reader
        self._seed = seed
        self._blocks = [reader.blocks_of_pair_set(number) for number in range(len(reader.epoch_sizes))]
        self.order = Order(
            [reader.block_sizes[blocks] for blocks in self._blocks], reader.manifest.max_length, streams, seed
        )
        self._masking = masking or RunMasking()
        self._dynamic = masks_per_sample(reader, self._masking.strategy)
        self._positions = positions or (lambda stream, numbers: numbers * streams + stream)
        self._held: dict[int, list[_Loaded]] = {}

    @property
    def streams(self) -> int:
        """Number of streams."""
        return self.order.streams

    def cancel(self) -> None:
        """Give up what is being fetched ahead."""
        self.reader.cancel()

    def epochs(self, positions: np.ndarray) -> list[int]:
        """The epochs of positions (n,)."""
        return self.order.epochs_of(positions).tolist()

    def read(self, streams: range, position: int, count: int) -> Portion:
        """`count` samples of each of these streams from `position` on."""
        firsts = [self.order.first_from(position, stream) for stream in streams]
        return Portion(*_joined(self.pieces(streams, firsts, [first + count for first in firsts])))

    def pieces(self, streams: range, firsts: list[int], lasts: list[int]) -> list["_Piece"]:
        """Samples number `first` to `last` - 1 of each of these streams, stream after stream."""
        self._load(streams, firsts, lasts)
        return [
            (window, max(first, window.start) - window.start, min(last, window.stop) - window.start)
            for stream, first, last in zip(streams, firsts, lasts, strict=True)
            for window in self._held[stream]
            if window.start < last
        ]

    def _load(self, streams: range, firsts: list[int], lasts: list[int]) -> None:
        """Load the windows of each stream from its first sample on, and drop earlier ones."""
        wanted: list[WindowPlace] = []
        held = {}
        for stream, first, last in zip(streams, firsts, lasts, strict=True):
            kept = [window for window in self._held.get(stream, ()) if window.stop > first]
            held[stream] = kept if kept and kept[0].start <= first else []
            number = held[stream][-1].stop if held[stream] else first
            while number < last:
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
        """Begin to fetch the next window of each stream from the store."""
        for stream in streams:
            following = self.order.window(stream, self._held[stream][-1].stop)
            numbers, mask_set = self._stored_as(following.epoch)
            self.reader.fetch(numbers[following.blocks], mask_set)

    def _stored_as(self, epoch: int) -> tuple[np.ndarray, int | None]:
        """The blocks of an epoch's pair set, and the number of its mask set."""
        pair_sets = len(self._blocks)
        mask_set = None if self._dynamic else epoch // pair_sets % self.reader.manifest.mask_sets
        return self._blocks[epoch % pair_sets], mask_set

    def _load_windows(self, epoch: int, places: list[WindowPlace]) -> None:
        numbers, mask_set = self._stored_as(epoch)
        blocks = np.unique(np.concatenate([numbers[place.blocks] for place in places]))  # each block is decoded once
        decoded = self.reader.window(blocks, mask_set)
        starts = ragged.to_offsets(self.reader.block_sizes[blocks])
        lengths = decoded.samples.lengths
        rows, indices = [], []
        for place in places:
            own = numbers[place.blocks]
            sizes = self.reader.block_sizes[own]
            part = slice(place.skip, place.skip + place.stop - place.start)
            some = ragged.ranges(starts[np.searchsorted(blocks, own)], sizes)[part]
            order = window_order(lengths[some], self._seed, epoch, place.stream, place.number)
            rows.append(some[order])
            indices.append(ragged.ranges(self.reader.block_starts[own], sizes)[part][order])
        # All windows at once, since a window may have few rows.
        samples, masks = decoded.take(np.concatenate(rows))
        bounds = ragged.to_offsets(np.array([len(some) for some in rows])).tolist()
        for place, own, low, high in zip(places, indices, bounds[:-1], bounds[1:], strict=True):
            part_samples = samples.part(low, high)
            if self._dynamic:
                rate = self._masking.rate
                numbers = np.arange(place.start, place.stop)
                rates = None if rate is None else rate.at(self._positions(place.stream, numbers))
                drawn = self._dynamic.draw(part_samples, self._seed, epoch, own, rates)
            else:
                drawn = masks.part(low, high)
            self._held[place.stream].append(_Loaded(place.start, place.stop, own, part_samples, drawn))


_Piece = tuple[_Loaded, int, int]  # a window, and the range of its samples: start, stop


def _joined(pieces: list[_Piece]) -> tuple[np.ndarray, Samples, Masks]:
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


@dataclass(frozen=True)
class Mixture:
    """Prepared folders that a run mixes, and their shares of the samples by phase."""

    readers: Sequence[ShardReader]
    phases: Sequence[Phase]

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources."""
        return sum(reader.num_samples for reader in self.readers)

    @property
    def mean_length(self) -> float:
        """Mean tokens per sample, in the phase where it is smallest."""
        lengths = np.array([reader.mean_length for reader in self.readers])
        return min(float(np.average(lengths, weights=phase.shares)) for phase in self.phases)


def source_seed(seed: int, source: int) -> int:
    """The seed of a source's order and masks, different for each source. The first source has the run's seed, so that a
    mixture of one source equals a run without a mixture.
    """
    return derived_seed(seed, _SOURCE, source) if source else seed


class MixedStreams:
    """The endless streams of samples of a mixture: stream l takes its samples from stream l of each source, in the
    order of `MixtureOrder`. Each source has its own epochs.
    """

    def __init__(self, mixture: Mixture, streams: int, seed: int, masking: RunMasking | None = None):
        self.order = MixtureOrder(mixture.phases, streams)
        self._sources = [
            SampleStreams(reader, streams, source_seed(seed, source), masking, partial(self.order.positions, source))
            for source, reader in enumerate(mixture.readers)
        ]

    @property
    def streams(self) -> int:
        """Number of streams."""
        return self.order.streams

    def cancel(self) -> None:
        """Give up what is being fetched ahead."""
        for source in self._sources:
            source.cancel()

    def epochs_of_sources(self, positions: np.ndarray) -> np.ndarray:
        """Number of complete passes over each source before positions (n,): (n, sources)."""
        consumed = self.order.consumed(positions)
        epochs = [made.order.epochs_of(consumed[:, source]) for source, made in enumerate(self._sources)]
        return np.stack(epochs, axis=1)

    def epochs(self, positions: np.ndarray) -> list[int]:
        """The lowest epoch of a source at each of the positions (n,)."""
        return self.epochs_of_sources(positions).min(axis=1).tolist()

    def read(self, streams: range, position: int, count: int) -> Portion:
        """`count` samples of each of these streams from `position` on."""
        firsts = first_from(position, np.array(streams), self.streams)
        before, after = self.order.before(streams, firsts), self.order.before(streams, firsts + count)
        sources = self.order.sources(streams, firsts, count).ravel()
        pieces = [
            piece
            for source, made in enumerate(self._sources)
            for piece in made.pieces(streams, before[:, source].tolist(), after[:, source].tolist())
        ]
        # The samples of each source are contiguous, in the order of the rows.
        rows = np.empty(len(sources), np.int64)
        rows[np.argsort(sources, kind="stable")] = np.arange(len(sources))
        return Portion(*_joined(pieces), rows=rows, sources=sources)
