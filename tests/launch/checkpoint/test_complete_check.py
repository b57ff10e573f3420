"""What a run that has ended may be begun again with."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import yaml

from cloze.launch.checkpoint.complete_check import (
    check_begun_again,
    check_folder_begun_again,
    said_otherwise,
    saved_facts,
)
from cloze.launch.config import FinetuneConfig
from cloze.launch.config.finetuning import FinetuneEvaluationConfig
from cloze.launch.training.resuming import TrainState
from cloze.pipeline.errors import UserError
from tests.launch.sweeps.scripted_runs import configured

STEPS = {"train": {"max_steps": 9}}
ENDED = TrainState(
    step=9, evaluated_step=9, seconds=2000.0, best_metric="loss", best_value=2.0, best_step=6, evaluations_since_best=3
)
COMPLETE = "found a complete run with "


def saved_by(config, facts, state):
    """The content of state.json, as it is read."""
    return json.loads(json.dumps(asdict(state) | saved_facts(config, facts)))


def both(*sections):
    fields = {"train": {}, "evaluation": {}}
    for section in sections:
        for name, values in section.items():
            fields[name] |= values
    return configured(fields)


def of_evaluation(**fields):
    return {"evaluation": fields}


def of_train(**fields):
    return {"train": fields}


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({}, {}, None),
        ({}, of_evaluation(every_steps=2), None),  # which decides nothing
        (of_evaluation(samples=8), of_evaluation(samples=24), f"{COMPLETE}evaluation.samples 8, expected 24"),
        ({}, of_evaluation(metric="mlm_loss"), f"{COMPLETE}evaluation.metric loss, expected mlm_loss"),
        (of_evaluation(patience=7), of_evaluation(patience=7, every_steps=2), f"{COMPLETE}evaluation.every_steps"),
        ({}, of_train(learning_rate=0.5), f"{COMPLETE}train.learning_rate auto, expected 0.5"),  # accepted, and unused
        ({}, of_train(max_steps=20), None),  # it goes on
        ({}, of_train(max_steps=20, learning_rate=0.5) | of_evaluation(samples=24), None),
        ({}, of_evaluation(patience=3), "run that has ended .all 9 steps are done.*with evaluation.patience 3 instead"),
    ],
)
def test_a_run_that_has_made_its_steps_goes_on_or_is_as_it_was(before, now, refused):
    """Its configuration was replaced, and its values remained those of the old one."""
    saved = saved_by(both(STEPS, before), {}, ENDED)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_begun_again(both(STEPS, now), {}, saved)


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"patience": 3}, {"patience": 2}, "with evaluation.patience 2 instead of 3: .*not better in 3 evaluations"),
        ({"patience": 3}, {"patience": 5}, None),  # it goes on
        (
            {"target": 2.5},
            {"target": 2.2},
            "run that has ended .*the target of 2.5 is reached.*target 2.2 instead of 2.5",
        ),
        ({"target": 2.5}, {"target": 1.0}, None),
        (
            {"patience": 3},
            {"patience": 3, "metric": "mlm_loss"},
            f"{COMPLETE}evaluation.metric loss, expected mlm_loss",
        ),
        ({}, {"patience": 1}, None),  # it was stopped, and ends here
        ({}, {"patience": 1, "samples": 24}, None),  # its best value does not count any more
    ],
)
def test_a_run_that_ended_by_its_best_evaluation_goes_on_or_is_as_it_was(before, now, refused):
    saved = saved_by(both({"evaluation": before}), {}, ENDED)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_begun_again(both({"evaluation": now}), {}, saved)


def test_a_run_that_was_stopped_ends_by_a_shorter_budget_if_it_was_measured_alike():
    """It had not ended by the longer one."""
    saved = saved_by(both(of_train(time_budget_hours=1.0)), {}, ENDED)
    shorter = of_train(time_budget_hours=0.5)
    check_begun_again(both(shorter), {}, saved)
    with pytest.raises(UserError, match="run that was measured with evaluation.samples .*the time budget of 0.5 hours"):
        check_begun_again(both(shorter, of_evaluation(samples=24)), {}, saved)
    check_begun_again(both(shorter, of_evaluation(samples=24)), {}, saved | {"evaluated_step": 6})  # it is measured yet


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"validation_sets_pooled": ""}, {"validation_set_hash.b": "2"}, None),  # its loss is of its own samples
        (
            {"validation_sets_pooled": "a, b"},
            {"validation_sets_pooled": "a"},
            "validation_sets_pooled a, b, expected a",
        ),
        ({}, {"validation_set_hash.a": "3"}, "validation_set_hash.a 1, expected 3"),
        ({"validation_hash": "1"}, {"validation_hash": "2"}, "validation_hash 1, expected 2"),
        ({"manifest_hash": "1"}, {"manifest_hash": "2"}, "manifest_hash 1, expected 2"),
    ],
)
def test_sets_come_and_go_where_the_metric_does_not_count_them(before, now, refused):
    before = {"validation_set_hash.a": "1", **before}
    saved = saved_by(both(STEPS), before, ENDED)
    with pytest.raises(UserError, match=COMPLETE + refused) if refused else nullcontext():
        check_begun_again(both(STEPS), before | now, saved)


@pytest.mark.parametrize("lost", [False, True], ids=["by its checkpoint", "whose checkpoint is lost"])
@pytest.mark.parametrize(
    ("made", "now", "refused"),
    [
        ({"keep_best": False}, {}, "evaluation.keep_best False, expected True"),
        ({"every_steps": 7}, {"every_steps": 5}, "evaluation.every_steps 7, expected 5"),
        ({"every_steps": 7, "keep_best": False}, {"every_steps": 5, "keep_best": False}, None),
    ],
)
def test_a_fine_tuning_is_as_its_checkpoint_says_whatever_its_status(tmp_path, made, now, refused, lost):
    """A start that was killed leaves `running`, and the configuration of another start may lie there. Without the
    checkpoint both count.
    """
    config = FinetuneConfig(task="sst2", model="m", train_file="t", validation="v", output=str(tmp_path))
    config = replace(config, train=replace(config.train, max_steps=9))
    before = replace(config, evaluation=FinetuneEvaluationConfig(metric="loss", **made))
    saved = {} if lost else saved_by(before, {}, ENDED)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(before)) if lost else "evaluation: {every_steps: 5}")
    state = "complete" if lost else "running"
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "step": 9}))
    with pytest.raises(UserError, match=COMPLETE + refused) if refused else nullcontext():
        check_begun_again(replace(config, evaluation=FinetuneEvaluationConfig(metric="loss", **now)), {}, saved)


def test_a_fine_tuning_that_made_its_steps_may_report_its_last_checkpoint_by_another_metric():
    """Not one that ended by its best evaluation, which would train on, nor one in a table."""
    config = FinetuneConfig(task="sst2", model="m", train_file="t", validation="v", output="run")
    by = {name: replace(config.evaluation, metric=name, keep_best=True, patience=3) for name in ("loss", "accuracy")}
    config = replace(config, train=replace(config.train, max_steps=9))
    saved = saved_by(replace(config, evaluation=by["loss"]), {}, ENDED)
    again = replace(config, evaluation=by["accuracy"])
    check_begun_again(again, {}, saved)
    for longer, in_a_table in ((config, True), (replace(config, train=replace(config.train, max_steps=20)), False)):
        saved = saved_by(replace(longer, evaluation=by["loss"]), {}, ENDED)
        with pytest.raises(UserError, match=f"{COMPLETE}evaluation.metric loss, expected accuracy"):
            check_begun_again(replace(longer, evaluation=by["accuracy"]), {}, saved, in_a_table)


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        (
            {"manifest_hash.a": "1"},
            {"manifest_hash.a": "1", "manifest_hash.b": "2"},
            "manifest_hash.b None, expected 2",
        ),
        (
            {"manifest_hash.a": "1", "manifest_hash.b": "2"},
            {"manifest_hash.a": "1"},
            "manifest_hash.b 2, expected None",
        ),
        ({"validation_sets_pooled": "a"}, {}, "validation_sets_pooled a, expected None"),
    ],
)
def test_sources_and_pooled_sets_may_not_come_and_go(before, now, refused):
    """The loss is one over all of them."""
    with pytest.raises(UserError, match=COMPLETE + refused):
        check_begun_again(both(STEPS), now, saved_by(both(STEPS), before, ENDED))


def test_a_run_that_was_never_measured_is_measured_when_there_is_something_to_measure_it_on():
    state = replace(ENDED, evaluated_step=-1, best_metric=None, best_value=None, best_step=-1)
    saved = saved_by(both(STEPS), {}, state)
    facts = {"validation_sets_pooled": "a", "validation_set_hash.a": "1"}
    with_a_set = both(STEPS, of_evaluation(sets={"a": "folder"}))
    check_begun_again(with_a_set, facts, saved)
    with pytest.raises(UserError, match=f"{COMPLETE}evaluation.sets.a None, expected folder"):
        check_begun_again(with_a_set, facts, saved, in_a_table=True)  # where it is not begun again
    with pytest.raises(UserError, match=f"{COMPLETE}train.learning_rate"):
        check_begun_again(both(STEPS, of_train(learning_rate=0.5)), {}, saved)


def test_other_evaluations_count_for_a_target_of_zero():
    """Of a coefficient of correlation."""
    ended = replace(ENDED, best_value=-0.5)
    saved = saved_by(both(of_evaluation(target=0.0)), {}, ended)
    with pytest.raises(UserError, match=f"{COMPLETE}evaluation.every_steps"):
        check_begun_again(both(of_evaluation(target=0.0, every_steps=2)), {}, saved)


def test_an_older_checkpoint_says_nothing_of_a_complete_run(tmp_path):
    """Whose newest one is lost: its configuration counts."""
    config = both(STEPS, of_evaluation(samples=8))
    config = replace(config, output=str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    (tmp_path / "status.json").write_text('{"state": "complete", "step": 9}')
    older = saved_by(config, {}, replace(ENDED, step=6, evaluated_step=6)) | {"world_size": 1, "zero_stage": 0}
    (tmp_path / "checkpoints/step-00000006").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000006/state.json").write_text(json.dumps(older))
    check_folder_begun_again(config, {})
    again = replace(config, evaluation=replace(config.evaluation, samples=24))
    for state in (None, "[]", json.dumps(older)):
        if state is not None:
            (tmp_path / "checkpoints/step-00000009").mkdir(exist_ok=True)
            (tmp_path / "checkpoints/step-00000009/state.json").write_text(state)
        with pytest.raises(UserError, match=f"{COMPLETE}evaluation.samples 8, expected 24"):
            check_folder_begun_again(again, {})


def test_what_a_checkpoint_says_of_its_run_is_compared_with_the_configuration_now():
    """A run that ends at once, by a patience that it was begun again with, has no other state."""
    config = both(STEPS)
    saved = saved_by(config, {"validation_set_hash.a": "1"}, ENDED)
    assert not said_otherwise(saved, config, {"validation_set_hash.a": "1", "validation_set_hash.b": "2"})
    assert not said_otherwise({"measures": {}}, both(of_evaluation(patience=3)), {})
    assert said_otherwise(saved, both(STEPS, of_evaluation(patience=3)), {"validation_set_hash.a": "1"})
    assert said_otherwise(saved, config, {"validation_set_hash.a": "2"})


@pytest.mark.parametrize("steps", [None, "9", [9], True])
def test_ends_that_no_run_writes_are_believed_no_more(steps):
    """They were a traceback: it is as if they were not there."""
    saved = saved_by(both(STEPS), {}, ENDED)
    saved["ends"] |= {"train.max_steps": steps}
    check_begun_again(both(STEPS), {}, saved)
    saved["ends"] |= {"train.max_steps": 9, "evaluation.target": "low"}
    check_begun_again(both(STEPS), {}, saved)
    saved["ends"] = {"train.max_steps": 9}
    check_begun_again(both(STEPS), {}, saved)
