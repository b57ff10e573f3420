"""What backward hides of sums."""

import pytest

from cloze.launch.tools.planning.assumptions import COLLECTIVE_PROCESSORS
from cloze.launch.tools.planning.estimate import waited_for


@pytest.mark.parametrize(
    ("sums", "parts", "left"),
    [
        ([2.0], [1.0], 2.0),  # one bucket: nothing runs beside
        ([2.0, 3.0], [0.5, 1.0], 3.0),  # the first is through when backward ends
        ([6.0, 3.0], [0.5, 1.0], 4.0),  # and here it is not
        ([1.0, 1.0, 1.0], [0.1, 0.9, 1.0], 1.0),
        ([9.0, 9.0, 1.0], [0.1, 0.2, 1.0], 10.0),
    ],
)
def test_what_backward_hides_of_sums(sums, parts, left):
    """Backward takes 10 s."""
    hidden = sum(sums) - left
    assert waited_for(sums, parts, 10.0) == pytest.approx(left + COLLECTIVE_PROCESSORS * hidden)
