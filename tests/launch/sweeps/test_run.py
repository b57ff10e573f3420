"""One run of a sweep: when its results count."""

import math
from dataclasses import asdict, replace

import pytest
import yaml

from cloze.launch.run import runs
from cloze.launch.sweeps.run import fault_in_runs, no_better
from tests.launch.sweeps.scripted_runs import completing, configured, scripted


def test_a_value_is_compared_with_that_of_the_most_frequent_answer():
    assert no_better("validation/accuracy", 0.6, 0.5) is None, "better"
    assert no_better("validation/accuracy", 0.6, None) is None, "there is no such answer"
    said = no_better("test/a/accuracy", 0.5, 0.5)
    assert said == "test/a/accuracy 0.5000, no better than 0.5000, that of always giving the most frequent answer"
    assert no_better("validation/loss", 0.4, 0.5) is None and no_better("validation/loss", 0.6, 0.5)
    assert no_better("validation/matthews_correlation", math.nan, 0.0), "of one constant answer"


@pytest.mark.parametrize(
    ("made", "planned"),
    [
        ({"train": {"max_steps": 4}}, {"train": {"max_steps": 6}}),
        ({"train": {"max_steps": 4}}, {"train": {"max_steps": 3}}),
        ({"train": {"time_budget_hours": 1.0}}, {"train": {"time_budget_hours": 2.0}}),
        ({"train": {"time_budget_hours": 1.0}}, {}),
        ({"evaluation": {"patience": 2}}, {}),
        ({"evaluation": {"target": 0.5}}, {"evaluation": {"target": 0.75}}),
        ({"evaluation": {"target": 0.5}}, {}),
    ],
)
def test_a_run_that_ended_elsewhere_than_planned_is_run_again(tmp_path, made, planned):
    """As where a sweep is made longer, with checkpoint.accept_changes, or without the patience that it had."""

    run = scripted(tmp_path, "a")
    exec(completing(run.folder))  # noqa: S102
    (run.folder / runs.CONFIG).write_text(yaml.safe_dump(asdict(configured(made))))
    assert replace(run, config=configured(made, run.folder)).measured
    run = replace(run, config=configured(planned, run.folder))
    assert not run.measured
    (run.folder / runs.METRICS).write_text("{}\n")
    (run.folder / runs.CONFIG).write_text("")
    assert run.measured and "nothing in it" in fault_in_runs([run]), "it is not begun again, and the sweep says why"


@pytest.mark.parametrize("name", [runs.CONFIG, runs.DATA])
def test_a_run_without_its_description_does_not_count(tmp_path, name):
    run = scripted(tmp_path, "a")
    exec(completing(run.folder))  # noqa: S102
    (run.folder / runs.METRICS).write_text("{}\n")
    assert fault_in_runs([run]) is None
    (run.folder / name).write_text("")
    assert fault_in_runs([run]).startswith(f"{run.folder / name}: found nothing in it")


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_run_with_damaged_results_is_run_again(tmp_path, content):
    run = scripted(tmp_path, "a")
    exec(completing(run.folder))  # noqa: S102
    path = run.folder / runs.RESULTS
    path.unlink() if content is None else path.write_text(content)
    assert run.results() is None and not run.measured
