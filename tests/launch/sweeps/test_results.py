"""The results of a sweep: statistics by setting, failed runs, the best."""

import json
import math
import statistics
import subprocess
import sys

import pytest

from cloze.launch.pretrain.sweep import PretrainingRun
from cloze.launch.sweeps.results import Sweep
from cloze.launch.sweeps.run import Run
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError


def test_a_run_whose_last_loss_is_no_number_has_failed_and_the_others_count(tmp_path, capsys):
    runs = []
    for name, value in (("rate=2", None), ("rate=1", 2.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text('{"state": "complete", "step": 1}')
        lines = ({"step": 1, "speed/tokens_per_second": 1009.0}, {"step": 1, "validation/loss": value})
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(PretrainingRun(name, tmp_path / name, {"train.rate": name[-1]}))
    sweep = Sweep(tmp_path, runs, "at the end", columns={"tokens/s": "speed/tokens_per_second"})
    summary = sweep.summarize()
    assert [(entry["runs"], entry["failed"]) for entry in summary["settings"]] == [
        (["rate=1"], {}),
        (["rate=2"], {"rate=2": "its validation/loss is not a number"}),
    ], "the best setting first"
    assert summary["best"]["median"] == {"value": 2.5, "settings": {"train.rate": "1"}} and summary["n"] == 1
    sweep.draw(summary)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    sweep.show(summary, Console())
    said = " ".join(capsys.readouterr()).replace("│", " ")
    assert [words for line in said.splitlines() if (words := line.split())[:1] == ["rate"]] == [
        ["rate", "1", "2.5000", "2.5000", "±", "-", "1", "1,009", "0"],
        ["rate", "2", "-", "-", "0", "-", "1"],
    ]
    assert "rate=2 failed: its validation/loss is not a number" in said and "best run: rate=1, 2.5000" in said


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"step": 4, "validation/loss": 3}', '{"step": 6, "validation/loss": 2}'], {"validation/loss": 2}),
        (['{"step": 4, "validation/loss": 3}', '{"step": 6, "validation/loss": "abc"}'], None),
        (['{"step": 4, "validation/loss": 3}', '{"step": 6, "validation/loss": 2'], None),
        (['{"step": 4, "validation/loss": 3}', '{"step": 6, "train/loss": 2}'], None),
        (['{"step": 4, "validation/loss": 3}', '{"step": 6, "validation/loss": null}'], {}),
        (['{"step": 6, "validation/loss": 2}', '{"step": 6, "train/loss": 9}'], {"validation/loss": 2}),
        (['{"step": 4, "validation/loss": 3}', '{"step": 7, "validation/loss": 2}'], {"validation/loss": 2}),
        (
            [
                '{"step": 2, "speed/tokens_per_second": null}',
                '{"step": 4, "speed/tokens_per_second": 5}',
                '{"step": 6, "validation/loss": 2}',
            ],
            {"validation/loss": 2, "speed/tokens_per_second": 5},
        ),
        ([], None),
        (None, None),
    ],
)
def test_what_a_run_has_reached_is_its_evaluation_at_the_end_alone(tmp_path, lines, expected):
    """An earlier one was once taken for it where the last line was damaged. None: its line is lost, which is not the
    same as a value that was not finite. The end is after the last checkpoint if the last steps were skipped.
    """
    run = PretrainingRun("1", tmp_path / "1")
    run.folder.mkdir()
    (run.folder / "status.json").write_text('{"state": "complete", "step": 6}')
    if lines is not None:
        (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert run.results().values == (expected or {}) and (run.lost_curve() is None) == (expected is not None)


def test_without_validation_the_loss_of_the_last_steps_counts(tmp_path):
    run = PretrainingRun("1", tmp_path / "1", metric="train/loss")
    run.folder.mkdir()
    (run.folder / "status.json").write_text('{"state": "complete", "step": 6}')
    for line, values, lost in (
        ('"train/loss": 2.5', {"train/loss": 2.5}, False),
        ('"train/skipped_steps": 6', {}, False),  # all of them were skipped, and there is no loss
        ('"validation/loss": 2.5', {}, True),
    ):
        (run.folder / "metrics.jsonl").write_text(f'{{"step": 6, {line}}}\n')
        assert run.results().values == values and (run.lost_curve() is not None) == lost


@pytest.mark.parametrize(
    "change",
    [
        {"metric": None},
        {"metric": ["a"]},
        {"validation": 3},
        {"validation": {"accuracy": "x"}},
        {"validation": {"accuracy": True}},
        {"majority": None},
        {"majority": {"accuracy": "x"}},
    ],
)
def test_results_that_no_run_writes_are_refused_by_their_file(tmp_path, change):
    run = Run("1", tmp_path / "1")
    run.folder.mkdir()
    (run.folder / "status.json").write_text('{"state": "complete", "step": 1}')
    values = {"accuracy": 0.5, "accuracy_total": 0.25, "examples": 4, "HasAns_total": 2}
    content = {"metric": "accuracy", "validation": values, "majority": {"accuracy": 0.5}}
    path = run.folder / "results.json"
    path.write_text(json.dumps(content))
    assert run.results().values == {"validation/accuracy": 0.5, "validation/accuracy_total": 0.25}
    for changed in (content | change, {"metric": 1}):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match="results.json: found no results of a run, expected a metric and numbers"):
            run.results()


def test_of_fine_tuning_runs_the_higher_accuracy_is_best_and_the_majority_answer_fails(tmp_path):
    runs = []
    for rate, seed, accuracy in (("1", 1, 0.5), ("1", 2, 0.75), ("2", 1, 0.875), ("2", 2, None)):
        run = Run(f"{rate}-{seed}", tmp_path / f"{rate}-{seed}", {"train.rate": rate})
        run.folder.mkdir()
        (run.folder / "status.json").write_text('{"state": "complete", "step": 1}')
        measured = {"examples": 8, "accuracy": accuracy, "HasAns_total": 4}
        content = {"metric": "accuracy", "validation": measured, "test/a": measured, "majority": {"accuracy": 0.5}}
        (run.folder / "results.json").write_text(json.dumps(content | {"steps": {"accuracy": 1.0}}))
        runs.append(run)
    runs.append(Run("2-3", tmp_path / "2-3", {"train.rate": "2"}))
    runs[-1].log.write_text("first\nout of memory\n\n")
    summary = Sweep(tmp_path, runs, "at the best checkpoint", {"task": "rte"}).summarize()
    best, other = summary["settings"]
    assert best["settings"] == {"train.rate": "2"} and set(best["metrics"]) == {
        "validation/accuracy",
        "test/a/accuracy",
    }
    assert best["failed"] == {
        "2-2": "its validation/accuracy is not a number",
        "2-3": "no result: out of memory",
    }
    assert other["failed"] == {
        "1-1": "validation/accuracy 0.5000, no better than 0.5000, that of always giving the most frequent answer"
    }
    values = other["metrics"]["validation/accuracy"]
    assert values["values"] == {"1-1": 0.5, "1-2": 0.75} and values["median"] == values["mean"] == 0.625
    assert math.isclose(values["deviation"], statistics.stdev([0.5, 0.75])) and values["n"] == 2
    assert summary["best"]["run"] == {"value": 0.875, "name": "2-1"} and summary["task"] == "rte"


BEHIND_THE_LAST = """
import signal, sys
from pathlib import Path
from cloze.launch.sweeps.results import Sweep
from cloze.launch.system.console import Console
from tests.launch.sweeps.scripted_runs import scripted

def draw(sweep, summary):
    signal.raise_signal(signal.SIGTERM)
    print("drawn")

Sweep.draw = draw
folder = Path(sys.argv[1])
assert Sweep(folder, [scripted(folder, "a")], "at the end").reach_end([""], Console())
"""


def test_a_signal_behind_the_last_run_stops_nothing(tmp_path):
    """It ended the sweep before its table, without a line."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    done = subprocess.run([sys.executable, "-c", BEHIND_THE_LAST, tmp_path], capture_output=True, text=True, check=True)
    assert "drawn" in done.stdout and "best run: a, 0.5000" in done.stdout
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "complete"
