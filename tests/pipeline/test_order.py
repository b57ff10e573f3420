"""The order of samples: permutations, the same wherever reading begins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import order

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=200)


@given(sizes=SIZES, seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_an_epoch_holds_every_sample_once(sizes, seed, epoch):
    indices = order.epoch_indices(np.array(sizes), seed, epoch)
    assert np.array_equal(np.sort(indices), np.arange(sum(sizes)))


@given(sizes=SIZES, cuts=st.lists(st.integers(0, 10_000), max_size=4))
def test_a_part_of_an_epoch_is_a_slice_of_it(sizes, cuts):
    whole = order.epoch_indices(np.array(sizes), 3, 1)
    bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parts = [order.epoch_indices(np.array(sizes), 3, 1, a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_differ():
    sizes = np.full(100, 40)
    orders = {order.epoch_indices(sizes, seed, epoch).tobytes() for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_rows_of_a_block_spread_over_a_window():
    indices = order.epoch_indices(np.full(256, 64), 5, 0)
    first_window = indices[: 64 * 64]
    assert len(set((first_window // 64).tolist())) == 64
    assert len(set((first_window[:64] // 64).tolist())) > 30  # neighbours come from many blocks


@pytest.mark.parametrize("sizes", [[10], [10, 7, 3]])
def test_positions_run_through_the_epochs(sizes):
    found = [order.locate(position, sizes) for position in range(3 * sum(sizes))]
    expected = [(epoch, offset) for epoch in range(3 * len(sizes)) for offset in range(sizes[epoch % len(sizes)])]
    assert found == expected
