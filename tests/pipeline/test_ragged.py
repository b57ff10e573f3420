"""Rows of ragged arrays, taken in any order."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.pipeline import ragged


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_are_taken_with_their_values(dtype):
    """Any rows, also twice, empty ones and none; of arrays that are parts of others."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 90, 50) * (rng.random(50) < 0.8)
    offsets = ragged.to_offsets(lengths)
    values = rng.integers(0, np.iinfo(dtype).max, 2 * offsets[-1]).astype(dtype)[::2]
    for rows in (rng.permutation(50), rng.integers(0, 50, 200), np.flatnonzero(lengths == 0), np.empty(0, np.int64)):
        found, bounds = ragged.take(values, offsets, rows)
        expected = [values[offsets[row] : offsets[row + 1]] for row in rows]
        assert found.dtype == dtype and bounds.dtype == np.int64
        assert np.array_equal(bounds, ragged.to_offsets(lengths[rows]))
        assert np.array_equal(found, np.concatenate([np.empty(0, dtype), *expected]))


@given(runs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=6))
@pytest.mark.parametrize("long_run", [0, 1, 1 << 30])
def test_places_within_rows_whether_they_are_written_by_runs_or_not(runs, long_run):
    lengths = np.array([length for count, length in runs for _ in range(count)], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_LONG_RUN", long_run)
        found = ragged.within(ragged.to_offsets(lengths))
    assert found.dtype == np.int64 and found.tolist() == [place for length in lengths for place in range(length)]


def test_nulls_become_numbers_and_pandas_stays_unimported():
    """pyarrow imports pandas, which takes as long as the rest of a small job, where a number becomes a scalar."""
    code = (
        "import sys, numpy as np; from cloze.pipeline.ragged import from_arrow, to_arrow\n"
        "values = to_arrow(np.array([3, 9, 5], np.int8), np.array([True, False, True]))\n"
        "print(from_arrow(values, null=-100), from_arrow(values[1:], null=0), 'pandas' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[   3 -100    5] [0 5] False\n"
