"""`cloze sweep`: a grid of pretrainings, killed and started again, and as a job array."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.sweep import PretrainingRun, plan, warn_of_other_weights
from cloze.launch.run import runs
from cloze.launch.run.description import write_description
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.status_file import read_status, set_status
from cloze.launch.sweeps import results as sweep_results
from cloze.launch.sweeps.results import Sweep
from cloze.launch.sweeps.run import claim, file_of, is_claimed
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from tests.commands import forked_cloze, main_of_python
from tests.forked import ForkedRun
from tests.launch.checkpoint.small_checkpoints import manager, publish
from tests.launch.tiny_models import tokenizer
from tests.launching import finish, kill_when, pretrain_arguments, step_of
from tests.synthetic import make_shards

GRID = ("--grid", "learning_rate=1e-3,3e-3", "seed=1,2")
NAMES = [f"learning_rate={rate},seed={seed}" for rate in ("1e-3", "3e-3") for seed in (1, 2)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


def words(data, folder, *more: str) -> list[str]:
    return ["sweep", *pretrain_arguments(data, folder, "--train.max_steps", "6", *more)[1:]]


def test_a_folder_of_a_run_is_not_the_configuration_of_another(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix").symlink_to(data)
    (tmp_path / "mix.yaml").write_text("sources: [{path: mix}]")
    asked = words(data, tmp_path / "sweep", "--evaluation.metric", "loss", "--grid", "data=mix,mix.yaml")
    with pytest.raises(UserError, match="whose runs would both write .*/data=mix.yaml, expected names that differ"):
        plan(parse("sweep", asked[1:]))


def test_one_run_of_a_grid_is_taken_by_one_process(data, tmp_path, capsys, monkeypatch):
    """From its configuration on, and for as long as the program that it becomes."""
    asked = words(data, tmp_path / "sweep", "--grid", "seed=1,2")
    run = plan(parse("sweep", asked[1:]))[1]
    with claim(replace(run, configuration="of another")):
        assert main([*asked, "--run", "1"]) == 2
        assert "run: found" in (said := capsys.readouterr().err) and "seed=2 in use by another job" in said
        assert file_of(run.folder).read_text() == "of another"
    inherited = []

    def become(program, command):
        inherited.extend(os.get_inheritable(int(fd)) for fd in os.listdir("/proc/self/fd") if _is(fd, run.log))
        assert is_claimed(run) and file_of(run.folder).read_text() == run.configuration
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit):
        main([*asked, "--run", "1"])
    assert inherited == [True]


def _is(descriptor: str, path: Path) -> bool:
    return os.path.exists(link := f"/proc/self/fd/{descriptor}") and os.path.samefile(link, path)


def test_runs_are_compared_by_what_they_measure(data, tmp_path):
    """Each measures the held-out samples of those sources that have some, and of further sets."""
    without = make_shards(tmp_path / "without", validation=0)
    (tmp_path / "mixture.yaml").write_text(f"sources: [{{path: {without}, name: a}}, {{path: {data}, name: b}}]")
    for number, (place, more, metric) in enumerate(
        (
            (tmp_path / "mixture.yaml", ("--evaluation.metric", "loss"), "validation/loss"),
            (without, ("--evaluation.sets.news", str(data)), "validation/loss"),
            (without, (), "train/loss"),
        )
    ):
        asked = words(place, tmp_path / str(number), *more, "--grid", "seed=1,2")
        assert {run.metric for run in plan(parse("sweep", asked[1:]))} == {metric}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "grid: found none, expected settings to try"),
        (("--grid", "learning_rte=1,2"), "learning_rte, which is no"),
        (("--grid", "learning_rate=1e-3,-1"), "train.learning_rate: found -1"),
        (("--grid", "output=a,b"), "grid: found 'output', expected another field"),
        (("--grid", "data_streams=16,5"), "data_streams: found 5, expected a divisor"),
        ((*GRID, "--run", "4"), "run: found 4, expected 0 to 3"),
        ((*GRID, "--output", "s3://bucket/runs"), "output: found s3://bucket/runs, expected a folder"),
    ],
)
def test_what_is_wrong_with_a_grid_is_said_before_anything_runs(data, tmp_path, capsys, more, said):
    assert main(words(data, tmp_path / "sweep", *more)) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1, error
    assert not any(path.is_dir() for path in (tmp_path / "sweep").glob("*"))


def test_runs_that_are_measured_on_other_samples_are_warned_of(data, tmp_path, capsys):
    assert main(words(data, tmp_path / "sweep", "--grid", "evaluation.samples=2,4", "--run", "9")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2, said
    warning, error = said.splitlines()
    assert warning.startswith("warning: grid: found evaluation.samples, by which") and "run: found 9" in error


def test_runs_that_began_with_other_weights_are_warned_of(tmp_path, capsys):
    """The folder that init_from names was replaced between two commands of one sweep."""
    planned = [PretrainingRun(str(seed), tmp_path / str(seed), {}, [], "validation/loss") for seed in (1, 2)]
    for weights, warned in (("a", False), ("b", True), (None, False), ([], False)):
        for run, first in zip(planned, ("a", weights), strict=True):
            run.folder.mkdir(exist_ok=True)
            (run.folder / "software.json").write_text(json.dumps({"first_weights": first}))
        warn_of_other_weights(planned, Console())
        assert ("began with other weights than the rest" in capsys.readouterr().err) == warned


STEPS = "checkpoints/step-*"


@pytest.mark.parametrize(
    ("change", "names", "said", "again"),
    [
        ("removed", "checkpoints/step-00000006", "found only older checkpoints whole (of step 6: it is missing)", True),
        ("cut", "checkpoints/step-00000006/rank-00000.pt", "(of step 6: rank-00000.pt has 3 bytes, expected 6)", True),
        ("removed", f"{STEPS}/rank-00000.pt", "found no whole checkpoint (of step 6: rank-00000.pt is missing)", False),
        ("cut", f"{STEPS}/rank-00000.pt", "whole checkpoint (of step 6: rank-00000.pt has 3 bytes, expected 6)", False),
        ("removed", f"{STEPS}/*", "found no whole checkpoint (of step 6: checksums.json or state.json is", False),
        ("removed", STEPS, "found no whole checkpoint (of step 6: it is missing)", False),
        ("removed", "tokenizer", "tokenizer: found no tokenizer.json", True),
        ("cut", "tokenizer/tokenizer.json", "tokenizer.json: found another file", False),
        ("cut", "metrics.jsonl", "metrics.jsonl: found no validation/loss of step 6, the last one", None),
    ],
)
def test_what_a_complete_run_has_lost_is_said(tmp_path, capsys, monkeypatch, change, names, said, again):
    """Before the others are run, or meanwhile.

    Args:
        again: whether the run's command writes it again; None: without it there is no table.
    """
    monkeypatch.setattr(Sweep, "draw", lambda self, summary: None)
    ours, planned = tokenizer(), [PretrainingRun(name, tmp_path / name) for name in ("1", "2")]
    for value, run in enumerate(planned, 1):
        write_description(run.folder, PretrainConfig("d", str(run.folder)), {}, {runs.TOKENIZER: ours.save}, {})
        for step in (4, 6):
            publish(manager(run.folder / runs.CHECKPOINTS, []), step, b"123456")
        (run.folder / runs.METRICS).write_text(
            f'{{"step": 4, "validation/loss": 3}}\n{{"step": 6, "validation/loss": {value}}}\n'
        )
        set_status(run.folder, "complete", 6)
    sweep = Sweep(tmp_path, planned, "at the end")
    assert sweep.reach_end([""], Console()) and "warning" not in capsys.readouterr().err

    def lose(*_) -> bool:
        for path in planned[0].folder.glob(names):
            if change == "cut":
                os.truncate(path, path.stat().st_size // 2)
            else:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return False

    with monkeypatch.context() as patch:
        patch.setattr(sweep_results, "run_all", lose)
        if again is False:
            assert sweep.reach_end([""], Console())
            assert said in capsys.readouterr().err.replace("\n", " ")
        else:
            with pytest.raises(UserError, match=f"{re.escape(said)}.*: something was removed meanwhile; "):
                sweep.reach_end([""], Console())
    assert [run.measured for run in planned] == [not again, True]
    if again is False:
        assert sweep.reach_end([""], Console())
        printed = capsys.readouterr()
        assert printed.err.replace("\n", " ").count(said) == 1 and "best run: 1, 1.0000" in printed.out


@pytest.fixture
def forking(tmp_path):
    """The main of a sweep whose runs are forked."""
    with forked_cloze(tmp_path / "programs") as program:
        yield partial(main_of_python, program)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_shows_what_all_reach(data, tmp_path, forking):
    """One run is made as a job of an array, another is cut short with the sweep; a third asks for a change."""
    folder = tmp_path / "sweep"
    array = ForkedRun(words(data, folder, *GRID, "--run", "3", "--train.max_steps", "4000"), main=forking)
    while step_of(folder / NAMES[3]) < 3:
        assert array.poll() is None
        time.sleep(0.01)
    array.send_signal(signal.SIGTERM)
    assert "run 3 of 4" in finish(array, 75) and read_status(folder / NAMES[3])["state"] == "requeue"
    end = step_of(folder / NAMES[3]) + 2
    again = words(data, folder, *GRID, "--checkpoint.accept_changes", "true", "--train.max_steps", str(end))
    finish(ForkedRun([*again, "--run", "3"], main=forking))
    assert read_status(folder / NAMES[3])["state"] == "complete"
    kill_when(ForkedRun(again, main=forking), lambda: read_status(folder / NAMES[0]).get("state") == "complete")
    written = (folder / NAMES[0] / "metrics.jsonl").stat().st_mtime_ns
    said = finish(ForkedRun(again, main=forking))
    assert "runs are complete already" in said and (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / NAMES[0] / "metrics.jsonl").stat().st_mtime_ns == written
    found = json.loads((folder / "results.json").read_text())
    last = {
        name: [line["validation/loss"] for line in read_metrics(folder / name) if "validation/loss" in line][-1]
        for name in NAMES
    }
    for each in found["settings"]:
        measured = each["metrics"]["validation/loss"]
        assert measured["values"] == {name: last[name] for name in each["runs"]} and not each["failed"]
        assert measured["mean"] == pytest.approx(sum(last[name] for name in each["runs"]) / 2)
    medians = [each["metrics"]["validation/loss"]["median"] for each in found["settings"]]
    assert medians == sorted(medians) and found["best"]["median"]["value"] == medians[0] and found["n"] == 4
    shutil.rmtree(folder / NAMES[0] / "checkpoints")
    shutil.rmtree(folder / NAMES[1] / "tokenizer")
    said = finish(ForkedRun(again, main=forking)).replace("\n", " ")
    assert f"{NAMES[0]}/checkpoints: found no whole checkpoint (of step {end}: it is missing)" in said
    assert "3 of 4 runs are complete already" in said and f"run 2 of 4, {NAMES[1]} begins" in said
    assert (folder / NAMES[1] / "tokenizer/tokenizer.json").is_file()
    assert json.loads((folder / "results.json").read_text()) == found
