"""What a resumed run takes over of its evaluations."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cloze.launch.run.resume_check import ends_of
from cloze.launch.training import resuming
from cloze.launch.training.resuming import TrainState
from cloze.pipeline.errors import UserError
from tests.launch.run.scripted_runs import configured
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


def test_a_measure_that_is_null_is_as_one_that_is_not_there(monkeypatch):
    """As of a version that did not know it; nor did one the hash of a set."""
    monkeypatch.setattr(resuming, "ending", lambda config, state: None)
    config, state = configured({}), TrainState(best_metric="loss", best_value=2.0, best_step=4)
    now = {"data": "a", "evaluation.new": None, "validation_set_hash.news": "1"}
    for before in ({"data": "a"}, {"data": "a", "evaluation.old": None}):
        assert resuming._with_comparable_best(config, state, before, now, None) is state
    said = []
    process = SimpleNamespace(console=SimpleNamespace(warn=said.append))
    for before, name in (
        ({"data": "b", "evaluation.old": None}, "data"),
        (now | {"validation_set_hash.news": "2"}, "vali"),
    ):
        other = resuming._with_comparable_best(config, state, before, now, process)
        assert other.best_metric is None and said.pop().startswith(f"{name}")


def test_a_run_at_its_end_is_not_said_to_have_been_measured_otherwise():
    """Its configuration had the new number of samples, and its curve the values of the old one."""
    config = configured({"train": {"max_steps": 4}})
    state = TrainState(step=4, evaluated_step=4, best_metric="loss", best_value=2.0, best_step=4)
    with pytest.raises(UserError, match="samples: found 24, expected 8, by which this run was measured: all 4 steps"):
        resuming._with_comparable_best(config, state, {"samples": 8}, {"samples": 24}, None)


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"patience": 1}, {"patience": 2}, True),
        ({"patience": 1}, {"patience": 5}, False),  # it goes on
        ({}, {"patience": 1}, False),  # it was interrupted
    ],
)
def test_a_run_that_has_ended_by_another_patience_goes_on_or_is_refused(before, now, refused):
    state = TrainState(step=9, evaluated_step=9, best_metric="loss", best_value=2.0, evaluations_since_best=3)
    ends = ends_of(configured({"evaluation": before}))
    config = configured({"evaluation": now | {"metric": "loss"}})
    if refused:
        with pytest.raises(UserError, match="patience: found 2, expected 1, by which this run has ended"):
            resuming._check_end(config, state, ends)
    else:
        resuming._check_end(config, state, ends)
    config = replace(config, train=replace(config.train, max_steps=9))
    with pytest.raises(UserError, match="ends: found .* expected numbers"):
        resuming._check_end(config, state, ends | {"train.max_steps": "9"})


def test_a_run_that_was_stopped_ends_by_a_shorter_budget():
    """It had not ended by the longer one."""
    state = TrainState(step=9, evaluated_step=9, seconds=2000.0)
    ends = ends_of(configured({"train": {"time_budget_hours": 1.0}}))
    resuming._check_end(configured({"train": {"time_budget_hours": 0.5}}), state, ends)
