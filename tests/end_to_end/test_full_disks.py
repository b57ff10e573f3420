"""Commands whose disk is full or read-only from some moment on, or which are killed then: a line, and the undisturbed
result when they are run again."""

import pytest

from tests.full_disk import READ_ONLY, moments, starvations, starve
from tests.hostile_files import prepare_target


def test_preparation_goes_on_when_there_is_space_again(tmp_path):
    target = prepare_target(tmp_path / "texts")
    count, expected = moments(target, tmp_path / "whole")
    found = [
        starve(target, tmp_path / str(number), count * number // 4, how, expected)
        for number, how in ((1, 0), (3, READ_ONLY))
    ]
    assert [each.lost for each in found] == [None] * 2, found
    assert [each.status for each in found] == [2, 2]


@pytest.mark.slow
def test_every_command_goes_on_when_there_is_space_again(tmp_path):
    lost = [outcome for outcome in starvations(tmp_path, 7, seed=5) if outcome.lost]
    assert lost == []
