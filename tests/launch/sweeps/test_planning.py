"""What a sweep runs: every combination."""

import pytest

from cloze.launch.finetune.sweep import _NO_SETTINGS
from cloze.launch.sweeps.planning import combinations
from cloze.pipeline.errors import UserError


def test_every_combination():
    assert combinations([]) == [{}]
    assert combinations(["learning_rate=2e-5,3e-5", "epochs=1,2"]) == [
        {"train.learning_rate": rate, "epochs": epochs} for rate in ("2e-5", "3e-5") for epochs in ("1", "2")
    ]
    wrong = [["learning_rate"], ["=1"], ["epochs=1,"], ["epochs=1,1"], ["seed=1,2"], ["epochs=1", "epochs=2"]]
    for grid in wrong:
        with pytest.raises(UserError, match="grid: found"):
            combinations(grid, _NO_SETTINGS)
    many = ",".join(map(str, range(300)))
    with pytest.raises(UserError, match="grid: found 27,000,000 combinations, expected at most 10,000"):
        combinations([f"{name}={many}" for name in ("epochs", "dropout", "max_length")], _NO_SETTINGS)
