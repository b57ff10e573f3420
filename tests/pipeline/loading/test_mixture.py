"""Mixtures: each source has its share of any batch, and each of its samples once in an epoch of its own."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.pipeline.config import MaskingConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading.batches import BatchStream, growing_batches
from cloze.pipeline.loading.mixture import MixtureOrder, Phase, whole_counts
from cloze.pipeline.loading.streams import MixedStreams, Mixture, RunMasking, SampleStreams
from cloze.pipeline.samples.masking import DynamicMasking, RatePhases, RateSchedule
from cloze.pipeline.shards.reader import ShardReader
from tests.pipeline import corpus

STREAMS = st.sampled_from([1, 2, 3, 8, 24, 100, 256])
SHARES = st.lists(st.sampled_from([0.0, 0.001, 0.1, 0.3, 1.0, 1.7]), min_size=1, max_size=6).filter(any)


pytestmark = pytest.mark.usefixtures("small_units")


def replayed(order: MixtureOrder, numbers: int) -> np.ndarray:
    """The source of each number of each stream, asked for at once: (streams, numbers)."""
    return order.sources(range(order.streams), np.zeros(order.streams, np.int64), numbers)


@st.composite
def phases(draw):
    """One to three phases, of as many sources each."""
    first = draw(SHARES)
    more = draw(st.lists(st.tuples(st.integers(0, 3000), st.permutations(first)), max_size=2))
    begins = np.cumsum([0, *(length for length, _ in more)]).tolist()
    return [
        Phase(begin, tuple(shares))
        for begin, shares in zip(begins, [first, *(shares for _, shares in more)], strict=True)
    ]


@given(shares=SHARES, period=st.sampled_from([1024, 1026, 65536]))
def test_whole_counts_are_the_shares(shares, period):
    counts = whole_counts(shares, period)
    assert counts.sum() == period and ((counts > 0) == (np.array(shares) > 0)).all()
    assert np.abs(counts - np.array(shares) / sum(shares) * period).max() <= 6


@given(shares=SHARES, streams=STREAMS, first=st.integers(0, 10**12))
@settings(max_examples=40)
def test_shares_are_exact_over_a_period_and_near_in_a_batch(shares, streams, first):
    order = MixtureOrder([Phase(0, tuple(shares))], streams)
    expected = whole_counts(shares, order.period)
    rows = order.period // streams
    found = order.sources(range(streams), np.full(streams, first), 2 * rows)
    for start in (0, 1, rows // 2, rows):
        assert np.array_equal(np.bincount(found[:, start : start + rows].ravel(), minlength=len(shares)), expected)
    exact = expected / order.period
    for row in range(0, 2 * rows, max(1, rows // 8)):  # at each number all streams together: to one sample
        assert np.abs(np.bincount(found[:, row], minlength=len(shares)) - exact * streams).max() <= 1
    # One stream meets every source in its share too, of any run of its numbers.
    own = order.sources(range(streams - 1, streams), np.full(1, first), 2 * order.period)[0]
    assert np.array_equal(np.bincount(own[7 : 7 + order.period], minlength=len(shares)), expected)
    ahead = np.cumsum(own[:, None] == np.arange(len(shares)), axis=0)
    assert np.abs(ahead - exact * np.arange(1, len(own) + 1)[:, None]).max() <= 6


def test_neighbouring_streams_have_about_the_same_of_every_source():
    """A process reads neighbours: were all of them of one source, it would have longer samples than others."""
    order = MixtureOrder([Phase(0, (0.7, 0.2, 0.1))], 256)
    found = replayed(order, 4)
    for low in range(0, 256, 16):
        for row in range(4):
            own = np.bincount(found[low : low + 16, row], minlength=3)
            assert np.abs(own - 16 * np.array([0.7, 0.2, 0.1])).max() <= 2.5


@given(made=phases(), streams=STREAMS, seek=st.integers(0, 200))
@settings(max_examples=60)
def test_a_seek_finds_what_counting_finds(made, streams, seek):
    order = MixtureOrder(made, streams)
    sources = replayed(order, 200)
    every = range(streams)
    counted = np.stack([np.bincount(row[:seek], minlength=order.num_sources) for row in sources])
    assert np.array_equal(order.before(every, np.full(streams, seek)), counted)
    assert np.array_equal(order.consumed(np.array([seek * streams]))[0], counted.sum(axis=0))
    assert np.array_equal(order.sources(every, np.full(streams, seek), 5)[:, : 200 - seek], sources[:, seek : seek + 5])
    for stream in {0, streams // 2, streams - 1}:
        for source in range(order.num_sources):
            at = np.flatnonzero(sources[stream] == source)
            assert np.array_equal(order.positions(source, stream, np.arange(len(at))), at * streams + stream)


def test_phases_begin_where_they_are_configured():
    order = MixtureOrder([Phase(0, (1.0, 0.0)), Phase(90, (0.0, 1.0)), Phase(160, (1.0, 1.0))], 8)
    found = replayed(order, 40)
    assert (found[:, :12] == 0).all() and (found[:, 12:20] == 1).all()  # 90 is met at number 12 of all streams
    assert np.bincount(found[:, 20:].ravel()).tolist() == [80, 80]
    assert order.positions(0, 3, np.array([11, 12]))[0] == 11 * 8 + 3
    never = MixtureOrder([Phase(0, (1.0, 1.0)), Phase(80, (0.0, 1.0))], 8)
    counts = np.arange(5, 20)
    assert (never.positions(0, 0, counts)[-3:] == np.iinfo(np.int64).max).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three prepared folders of one tokenizer: masks that are stored, masks that are drawn, longer samples."""
    base = tmp_path_factory.mktemp("mixture")
    made = []
    for number, options in enumerate(
        (
            {},
            {"masking": MaskingConfig(mode="dynamic")},
            {"max_length": 96, "mask_sets": 1},
        )
    ):
        corpus.write_jsonl(base / f"in-{number}" / "a.jsonl", corpus.documents(40 - 10 * number, seed=number))
        made.append(base / f"data-{number}")
        prepare(corpus.config(base, [base / f"in-{number}"], output=str(made[-1]), **options))
    return made


PHASES = (Phase(0, (0.5, 0.3, 0.2)), Phase(480, (0.1, 0.1, 0.8)), Phase(960, (0.0, 0.5, 0.5)))


def mixed(folders, made=PHASES) -> Mixture:
    return Mixture([ShardReader(folder) for folder in folders], made)


def take(data, count, rank=0, world_size=1, size=24, micro=4, start=0, streams=24, warmup=None, masking=None):
    stream = BatchStream(
        data,
        global_batch_size=size,
        micro_batch_size=micro,
        rank=rank,
        world_size=world_size,
        streams=streams,
        seed=1,
        samples_consumed=start,
        warmup=warmup,
        masking=masking,
    )
    try:
        return [next(stream) for _ in range(count)]
    finally:
        stream.close()


def contents(parts) -> list[tuple]:
    """The samples of a global batch with their masks, each with its source, sorted."""
    found = []
    for part in parts:
        samples = [len(micro["sequence_offsets"]) - 1 for micro in part.micro_batches]
        assert [len(sources) for sources in part.sources] == samples
        place = 0
        for micro, sources in zip(part.micro_batches, part.sources, strict=True):
            offsets = micro["sequence_offsets"].tolist()
            for source, low, high in zip(sources.tolist(), offsets, offsets[1:], strict=False):
                found.append((source, int(part.indices[place]), tuple(micro["input_ids"][low:high].tolist())))
                place += 1
    return sorted(found)


@given(
    first=st.integers(0, 60),
    world_size=st.sampled_from([1, 2, 3, 4, 6, 8, 24]),
    streams=st.sampled_from([1, 8, 24]),
    grows=st.booleans(),
)
@settings(max_examples=6)
def test_ranks_share_the_global_batches_of_a_mixture_from_any_position(folders, first, world_size, streams, grows):
    """Ids as they are masked: the rate, which follows the position, is the same for any ranks and after a resume too.
    The batches lie in all phases."""
    micro = 24 // world_size if world_size > 6 else 1
    options = {"streams": streams, "masking": RunMasking(RateSchedule(0.5, 0.1, 100, 1300)), "micro": micro}
    if grows:
        options |= {"size": 48, "warmup": growing_batches(24, 24, 700, 48)}
    whole = take(mixed(folders), first + 3, **options | {"micro": 24})[first:]
    parts = [
        take(mixed(folders), 3, rank, world_size, start=whole[0].position, **options) for rank in range(world_size)
    ]
    for number, alone in enumerate(whole):
        ranks = [part[number] for part in parts]
        assert contents(ranks) == contents([alone])
        assert all(
            (part.position, part.epoch, part.num_samples) == (alone.position, alone.epoch, alone.num_samples)
            for part in ranks
        )
        assert sum(part.num_masked for part in ranks) == alone.num_masked


@pytest.mark.parametrize("streams", [1, 8, 24])
def test_each_sample_of_a_source_comes_once_in_an_epoch_of_it(folders, streams):
    """Over all phases: the samples of a source, in the order of each stream's, make whole epochs."""
    data = mixed(folders, (*PHASES[:2], Phase(960, (0.4, 0.3, 0.3))))
    made = MixedStreams(data, streams, 1)
    batches = 6 * max(data.readers[0].num_samples, data.readers[1].num_samples) // 24
    taken = {source: [] for source in range(3)}
    for position in range(0, 24 * batches, 24):
        portion = made.read(range(streams), position, 24 // streams)
        for stream in range(streams):
            rows = np.arange(stream * 24 // streams, (stream + 1) * 24 // streams)
            for source, index in zip(portion.sources[rows], portion.indices[portion.rows[rows]], strict=True):
                taken[int(source)].append((stream, int(index)))
    for source, reader in enumerate(data.readers):
        own = SampleStreams(reader, streams, 0)  # where its epochs lie
        by_stream = [[index for each, index in taken[source] if each == stream] for stream in range(streams)]
        size = reader.epoch_sizes[0]
        lasts = [own.order.first_from(own.order.epoch_start(1), stream) for stream in range(streams)]
        assert all(len(indices) >= last for indices, last in zip(by_stream, lasts, strict=True)), "an epoch was read"
        epoch = np.concatenate([indices[:last] for indices, last in zip(by_stream, lasts, strict=True)])
        assert np.array_equal(np.sort(epoch), np.arange(size))
    epochs = made.epochs_of_sources(np.array([0, 24 * batches]))
    assert epochs[0].tolist() == [0, 0, 0] and (epochs[1] >= 1).all()
    counted = [len(taken[source]) // data.readers[source].num_samples for source in range(3)]
    assert epochs[1].tolist() == counted and made.epochs(np.array([24 * batches])) == [min(counted)]


def test_a_mixture_of_one_is_its_folder_alone(folders):
    alone = take(ShardReader(folders[0]), 40)
    for one, other in zip(alone, take(Mixture([ShardReader(folders[0])], [Phase(0, (3.0,))]), 40), strict=True):
        assert np.array_equal(one.indices, other.indices) and one.epoch == other.epoch
        assert all(
            np.array_equal(a["input_ids"], b["input_ids"])
            for a, b in zip(one.micro_batches, other.micro_batches, strict=True)
        )
        assert one.sources is None and all((sources == 0).all() for sources in other.sources)


def test_the_same_folder_twice_is_read_in_two_orders(folders):
    twice = take(Mixture([ShardReader(folders[1])] * 2, [Phase(0, (1.0, 1.0))]), 20)
    taken = [[], []]
    for source, index, _ in (each for batch in twice for each in contents([batch])):
        taken[source].append(index)
    assert set(taken[0]) != set(taken[1])


def test_a_rank_reads_and_masks_its_own_share_of_a_mixture(folders, monkeypatch):
    """Law 7. Of each source at most a block a stream more than the share."""
    data = [folders[0], folders[1]]
    made = (Phase(0, (0.6, 0.4)),)
    decoded, drawn = [], []
    decode, draw = ShardReader._decode, DynamicMasking.draw
    monkeypatch.setattr(
        ShardReader,
        "_decode",
        lambda reader, block, *rest: (decoded.append(int(reader.block_sizes[block])), decode(reader, block, *rest))[1],
    )
    monkeypatch.setattr(
        DynamicMasking, "draw", lambda self, some, *rest: (drawn.append(len(some)), draw(self, some, *rest))[1]
    )
    count = 3 * ShardReader(folders[0]).num_samples // 12
    costs = {}
    for world_size in (1, 2, 8):
        costs[world_size] = np.zeros(2)
        for rank in range(world_size):
            decoded.clear(), drawn.clear()
            streams = MixedStreams(mixed(data, made), 8, 1)
            for number in range(count):
                streams.read(range(rank * 8 // world_size, (rank + 1) * 8 // world_size), number * 24, 3)
            costs[world_size] += np.array([sum(decoded), sum(drawn)]) / (count * 24)
    assert all(masked < 0.4 * 1.3 for _, masked in costs.values())
    assert costs[8][0] <= 1.3 * costs[1][0] and costs[2][0] <= 1.3 * costs[1][0]


def test_rates_and_strategies_are_the_runs_where_masks_are_drawn(folders):
    phased = RunMasking(RatePhases((0.4, 0.1), (480,)), "whole_word")
    stored, drawn = Phase(0, (1.0, 0.0)), Phase(0, (0.0, 1.0))
    data = folders[:2]
    found = take(mixed(data, (drawn,)), 40, masking=phased)
    shares = [batch.num_masked / batch.num_tokens for batch in found]
    assert np.mean(shares[:20]) == pytest.approx(0.39, abs=0.02)
    assert np.mean(shares[20:]) == pytest.approx(0.1, abs=0.02)
    left, right = (take(mixed(data, (stored,)), 3, masking=masking) for masking in (None, phased))
    assert [batch.num_masked for batch in left] == [batch.num_masked for batch in right]
    reader = ShardReader(folders[1])
    changed = dataclasses.replace(
        reader.manifest,
        preparation={**reader.manifest.preparation, "masking": {**reader.manifest.masking, "selection": "independent"}},
    )
    with pytest.raises(UserError, match="masking.strategy: found span with .* is independent, expected count"):
        DynamicMasking(changed, "span")
