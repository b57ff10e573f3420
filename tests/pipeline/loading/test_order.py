"""The order of samples: permutations, the same wherever reading begins and however many read."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.pipeline import ragged
from cloze.pipeline.loading import order
from cloze.pipeline.loading.order import Order, choose_streams, window_order
from tests.pipeline.loading.plain_order import positions

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=60)
STREAMS = st.sampled_from([1, 2, 3, 7, 8, 64, 100, 1024])
LENGTHS = st.sampled_from([128, 1 << 15, 1 << 18, 1 << 24])  # windows of 131,072 samples down to a block, in all


def walk(made: Order, sizes, lengths, stream: int, number: int, count: int) -> np.ndarray:
    """`count` samples of a stream from a number on, window after window, as a reader takes them."""
    starts, found = ragged.to_offsets(np.array(sizes)), []
    while count:
        place = made.window(stream, number)
        assert place.start <= number < place.stop
        rows = np.concatenate([np.arange(starts[block], starts[block + 1]) for block in place.blocks])
        rows = rows[place.skip :][: place.stop - place.start]
        rows = rows[window_order(lengths[rows], made.seed, place.epoch, stream, place.number)]
        take = min(count, place.stop - number)
        found.append(rows[number - place.start :][:take])
        number, count = number + take, count - take
    return np.concatenate(found) if found else np.empty(0, np.int64)


@given(sizes=SIZES, streams=STREAMS, max_length=LENGTHS, seed=st.integers(0, 2**40))
def test_windows_are_the_table_worked_out_row_by_row(sizes, streams, max_length, seed):
    lengths = np.random.default_rng(seed).integers(1, 128, sum(sizes))
    expected = positions(sizes, lengths, max_length, streams, seed, epochs=2)
    made = Order([np.array(sizes)], max_length, streams, seed)
    for stream in range(streams):
        own = expected[stream::streams]
        assert np.array_equal(walk(made, sizes, lengths, stream, 0, len(own)), own)
    size = sum(sizes)
    for epoch in range(2):  # exactly the positions of an epoch hold each sample once
        assert np.array_equal(np.sort(expected[epoch * size : (epoch + 1) * size]), np.arange(size))


@given(sizes=SIZES, streams=STREAMS, position=st.integers(0, 10**13), seed=st.integers(0, 9))
def test_a_seek_is_arithmetic_and_finds_what_walking_finds(sizes, streams, position, seed):
    lengths = np.full(sum(sizes), 9)
    stream = position % streams
    first = Order([np.array(sizes)], 1 << 18, streams, seed).first_from(position, stream)
    assert first * streams + stream == position
    walked = walk(Order([np.array(sizes)], 1 << 18, streams, seed), sizes, lengths, stream, first, 40)
    for ahead in (0, 1, 17, 39):
        fresh = Order([np.array(sizes)], 1 << 18, streams, seed)
        assert walk(fresh, sizes, lengths, stream, first + ahead, 1) == walked[ahead]


@given(first=SIZES, second=SIZES, streams=STREAMS)
def test_epochs_cycle_through_pair_sets(first, second, streams):
    made = Order([np.array(first), np.array(second)], 1 << 18, streams, 1)
    a, b = sum(first), sum(second)
    assert [made.epoch_start(epoch) for epoch in range(5)] == [0, a, a + b, 2 * a + b, 2 * a + 2 * b]
    for position in {0, a - 1, a, a + b - 1, a + b, 2 * a + b}:
        epoch = made.epoch_of(position)
        assert made.epoch_start(epoch) <= position < made.epoch_start(epoch + 1)
        assert made.epochs_of(np.array([position])).tolist() == [epoch]
        place = made.window(position % streams, position // streams)
        assert place.epoch == epoch and place.blocks.max() < len((first, second)[epoch % 2])


def test_epochs_seeds_and_streams_differ():
    sizes, lengths = np.full(100, 40), np.full(4000, 9)
    orders = {
        positions(sizes, lengths, 1 << 15, streams, seed, 2)[epoch * 4000 :][:4000].tobytes()
        for streams in (8, 64)
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(orders) == 8


def test_any_run_of_a_window_has_all_lengths_alike():
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(1024) < 0.7, 128, rng.integers(8, 128, 1024))
    rows = window_order(lengths, 1, 2, 3, 4)
    assert np.array_equal(np.sort(rows), np.arange(1024))
    for size, spread in ((8, 0.16), (64, 0.03)):
        means = lengths[rows].reshape(-1, size).mean(axis=1) / lengths.mean()
        shuffled = rng.permutation(lengths).reshape(-1, size).mean(axis=1) / lengths.mean()
        assert np.abs(means - 1).max() < spread < np.abs(shuffled - 1).max()
    ties = [window_order(np.full(1024, 128), 1, 2, 3, number)[:8] for number in range(50)]
    assert len(set(map(tuple, ties))) == 50 and len(np.unique(ties)) > 200  # at random among equals


@pytest.mark.parametrize(("streams", "blocks"), [(1, 128), (8, 16), (256, 1)])
def test_rows_of_a_block_spread_over_a_window(streams, blocks):
    made = Order([np.full(2048, 1024)], 128, streams, 5)
    place = made.window(0, 0)
    assert len(place.blocks) == blocks and place.skip == 0
    if streams > 1:  # and neighbours in a batch come from windows far apart
        firsts = [made.window(stream, 0).blocks[0] for stream in range(streams)]
        assert np.median(np.abs(np.diff(firsts))) > 400  # of 2,048 blocks; at random a third of them


@given(sizes=st.lists(st.integers(1, 1 << 16), min_size=1, max_size=3), world_size=st.sampled_from([1, 2, 3, 64, 2000]))
def test_streams_divide_every_batch_and_processes_divide_them_if_they_can(sizes, world_size):
    sizes = [size * world_size for size in sizes]
    common, streams = math.gcd(*sizes), choose_streams(sizes, world_size)
    assert common % streams == 0 and streams % world_size == 0 and streams <= max(order.MOST_STREAMS, world_size)
    if common <= order.MOST_STREAMS:  # then they don't depend on the processes
        assert streams == common
    of_many = choose_streams(sizes, world_size, sources=8)  # each stream holds a window of every source
    assert common % of_many == 0 and of_many % world_size == 0
    assert of_many <= max(order.MOST_STREAMS // 8, world_size)
