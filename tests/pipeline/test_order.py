"""The order of samples: permutations, the same wherever reading begins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.pipeline.loading import order
from tests.pipeline.plain_order import epoch_indices

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=200)
LENGTHS = st.sampled_from([128, 1 << 15, 1 << 18, 1 << 24])  # windows of 131,072 samples down to 1


def indices_of(sizes, seed, epoch, *bounds, max_length=1 << 15):
    return epoch_indices(np.array(sizes), max_length, seed, epoch, *bounds)


@given(sizes=SIZES, max_length=LENGTHS, seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_an_epoch_holds_every_sample_once(sizes, max_length, seed, epoch):
    indices = indices_of(sizes, seed, epoch, max_length=max_length)
    assert np.array_equal(np.sort(indices), np.arange(sum(sizes)))


@given(sizes=SIZES, cuts=st.lists(st.integers(0, 10_000), max_size=4))
def test_a_part_of_an_epoch_is_a_slice_of_it(sizes, cuts):
    whole = indices_of(sizes, 3, 1)
    bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parts = [indices_of(sizes, 3, 1, a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_differ():
    sizes = np.full(100, 40)
    orders = {indices_of(sizes, seed, epoch).tobytes() for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize(("max_length", "blocks"), [(128, 32), (512, 8)])
def test_rows_of_a_block_spread_over_a_window(max_length, blocks):
    indices = indices_of(np.full(256, 4096), 5, 0, max_length=max_length)
    first_window = indices[: blocks * 4096]
    assert len(set((first_window // 4096).tolist())) == blocks
    assert len(set((first_window[:64] // 4096).tolist())) > blocks // 2  # neighbours come from many blocks


@pytest.mark.parametrize("sizes", [[10], [10, 7, 3]])
def test_positions_run_through_the_epochs(sizes):
    found = [order.locate(position, sizes) for position in range(3 * sum(sizes))]
    expected = [(epoch, offset) for epoch in range(3 * len(sizes)) for offset in range(sizes[epoch % len(sizes)])]
    assert found == expected
