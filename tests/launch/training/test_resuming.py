"""What a resumed run takes over of its evaluations."""

import json

import pytest

from cloze.launch.training import resuming
from cloze.launch.training.resuming import TrainState
from tests.launching import saved, train
from tests.synthetic import make_shards

EVALUATED = (
    *("--evaluation.every_steps", "2", "--checkpoint.every_steps", "4", "--train.max_steps", "8"),
    *("--checkpoint.accept_changes", "true"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("resuming"), train=64)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        (("--evaluation.samples", "24"), False),
        (("--evaluation.every_steps", "4"), True),
    ],
    ids=["other samples", "other times"],
)
def test_a_best_value_that_was_measured_otherwise_counts_no_more(data, tmp_path, changed, counts):
    """Of fewer samples it may be a lower one: no later evaluation would be the best, and patience would end the run."""
    run = tmp_path / "run"
    train(data, run, *EVALUATED, "--evaluation.samples", "8", "--train.max_steps", "4")
    before = json.loads((saved(run)[-1] / "state.json").read_text())
    assert before["best_step"] >= 0 and before["measures"]["evaluation.samples"] == 8
    said = train(data, run, *EVALUATED, "--evaluation.samples", "8", *changed)
    warned = f"evaluation.samples: found 24, 8 until now: the best loss of step {before['best_step']} does not compare"
    assert (warned in said.replace("\n", " ")) != counts
    after = json.loads((saved(run)[-1] / "state.json").read_text())
    assert after["best_step"] > 4 or counts


def test_a_measure_that_is_null_is_as_one_that_is_not_there():
    """As of a version that did not know it; nor did one the hash of a set. A set may be new."""
    state = TrainState(best_metric="loss", best_value=2.0, best_step=4)
    now = {"evaluation.samples": 8, "evaluation.masking_rate": None, "validation_set_hash.news": "1"}
    for before in ({"evaluation.samples": 8}, {}, {"evaluation.samples": 8, "validation_set_hash.old": "2"}):
        assert resuming._with_comparable_best(state, before, now, None) is state
    said = []
    for before, name in (
        (now | {"evaluation.samples": 9}, "evaluation.samples"),
        (now | {"validation_set_hash.news": "2"}, "validation_set_hash.news"),
    ):
        other = resuming._with_comparable_best(state, before, now, said.append)
        assert other.best_metric is None and said.pop().startswith(f"{name}: found ")
