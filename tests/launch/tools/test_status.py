"""`cloze runs` and `cloze status`: how runs stand, from the files of real runs."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from cloze.launch.cli import main
from cloze.launch.run import runs
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.progress_line import ProgressLine
from cloze.launch.system.console import Console
from cloze.launch.tools.status import _Tail, find_runs, read_run
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments, train
from tests.slowed import slow_from
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A complete run of 4 steps, in its second start."""
    folder = tmp_path_factory.mktemp("watching")
    make_shards(folder / "data", train=96)
    for steps in ("2", "4"):
        go_on(folder / "runs" / "a", steps)
    return folder / "runs" / "a"


def go_on(run, steps: str) -> str:
    return train(run.parents[1] / "data", run, "--train.max_steps", steps, "--checkpoint.accept_changes", "true")


def test_a_run_is_read_from_its_files(run):
    state = read_run(run)
    last = [line for line in read_metrics(run) if "train/loss" in line][-1]
    assert (state.state, state.step, state.max_steps, state.restarts) == ("complete", 4, 4, 1)
    assert state.loss == last["train/loss"] and state.tokens_per_second == last["speed/tokens_per_second"]
    assert state.seconds_left is None and state.heartbeat_seconds < 60


def test_what_says_that_it_runs_and_has_not_shown_itself_is_silent(run, tmp_path):
    now = json.loads((run / "heartbeats" / "rank-00000.json").read_text())["time"]
    before = (run / "status.json").read_text()
    (run / "status.json").write_text('{"state": "running", "step": 2}')
    try:
        assert read_run(run, now + 100).state == "running" and read_run(run, now + 200).state == "silent"
        assert read_run(run, now + 100).seconds_left == 0, "step 4 of 4 stands in its metrics"
        (run / "status.json").write_text('{"state": "runn')
        assert read_run(run).state == "new"
    finally:
        (run / "status.json").write_text(before)


def test_what_a_running_run_does_is_shown(run, capsys):
    """As its heartbeats say: of several processes each; how long, where it is long; nothing of one that has ended."""
    assert read_run(run).phase is None
    first, before = run / "heartbeats" / "rank-00000.json", (run / "status.json").read_text()
    kept, second, now = first.read_text(), first.with_name("rank-00001.json"), time.time()
    figures = (run / runs.METRICS).read_text()
    (run / "status.json").write_text('{"state": "running", "step": 2}')
    try:
        first.write_text(json.dumps({"time": now, "since": now - 3, "phase": "evaluate"}))
        assert read_run(run, now).phase == "evaluating" and main(["status", str(run)]) == 0
        assert "running: evaluating" in capsys.readouterr().out
        first.write_text(json.dumps({"time": now, "since": now - 75, "phase": "save"}))
        assert read_run(run, now).phase == "saving for 0:01:15"
        assert read_run(run, now + 600).state == "silent" and "saving" in read_run(run, now + 600).phase
        second.write_text(json.dumps({"time": now, "since": now, "phase": "data"}))
        assert read_run(run, now + 1).phase == "saving (1), waiting for data (1) for 0:01:16"
        second.write_text("{}")
        assert read_run(run, now).phase == "saving for 0:01:15", "one that is cut short says nothing"
        (run / runs.METRICS).write_text(figures + '{"step": 2, "speed/step_seconds": -1e308}\n')
        assert read_run(run, now).seconds_left is None and main(["status", str(run)]) == 0
    finally:
        (run / runs.METRICS).write_text(figures)
        first.write_text(kept), second.unlink(missing_ok=True), (run / "status.json").write_text(before)


def test_damaged_figures_are_left_out_with_a_warning(run, tmp_path, capsys):
    """Garbage in metrics.jsonl, status.json and the like: the run goes on, and what looks at it shows what is whole."""
    copy = tmp_path / "runs" / "a"
    shutil.copytree(run, copy)
    shutil.copytree(run.parents[1] / "data", tmp_path / "data")
    first, *others = (copy / runs.METRICS).read_bytes().splitlines(keepends=True)
    garbage = (
        b"PK\x03\x04\x80\xff\n",
        b"[1]\n",
        b'{"step": "2", "train/loss": 1}\n',
        b"[" * 100_000 + b"\n",
        b'{"step": 2, "train/loss": {}}\n',
        b'{"step": 2, "train/loss": NaN}\n',
        b'{"step": 2, "train/loss": 1e999}\n',
        b'{"step": 2, "train/loss": null}\n',
    )
    (copy / runs.METRICS).write_bytes(first + b"".join(garbage) + b"".join(others))
    for name in ("heartbeats/rank-00000.json", runs.STATUS, runs.SOFTWARE):
        (copy / name).write_text('{"time": [], "since": "x", "phase": {}, "state": [], "step": {}, "starts": []}')
    state = read_run(copy)
    assert (state.state, state.step, state.restarts, state.phase) == ("new", 4, None, None)
    assert main(["status", str(copy)]) == 0 and main(["runs", str(copy)]) == 0
    for name in ("heartbeats/rank-00000.json", runs.SOFTWARE):
        (copy / name).write_text('{"time": -1e999, "since": 0, "phase": "data", "starts": 1e999}')
    assert main(["status", str(copy)]) == 0 and read_run(copy).heartbeat_seconds is None
    (copy / runs.SOFTWARE).write_bytes(b"\x80")
    assert main(["export", str(copy), "--output", str(tmp_path / "model")]) == 2
    assert "software.json: found what is no JSON" in capsys.readouterr().err and not (tmp_path / "model").exists()
    (copy / runs.SOFTWARE).unlink()
    assert f"{runs.METRICS}: found 7 damaged lines, expected the figures of a step in each" in go_on(copy, "5")
    assert (
        read_metrics(copy)[: 2 + len(others)]
        == read_metrics(run)[:1] + [{"step": 2, "train/loss": None}] + read_metrics(run)[1:]
    ), "what is whole stays"


def test_a_folder_in_the_place_of_figures_is_one_line(run, tmp_path, capsys):
    """And a link to itself: for the run that would go on, and for who looks at it."""
    copy = tmp_path / "runs" / "a"
    shutil.copytree(run, copy)
    shutil.copytree(run.parents[1] / "data", tmp_path / "data")
    (copy / runs.METRICS).unlink()
    (copy / runs.METRICS).mkdir()
    expected = f"{copy / runs.METRICS}: found a folder, expected a file; move it away, then run the same command again"
    assert main(["status", str(copy)]) == 2
    assert capsys.readouterr().err == f"error: {expected}\n"
    said = train(tmp_path / "data", copy, "--train.max_steps", "5", "--checkpoint.accept_changes", "true", status=2)
    assert f"error: {expected}" in said and "Traceback" not in said
    (copy / runs.METRICS).rmdir()
    (copy / runs.METRICS).symlink_to(runs.METRICS)
    assert main(["status", str(copy)]) == 2 and main(["runs", str(copy)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("metrics.jsonl: Too many levels of symbolic links; fix this" in line for line in said)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "nothing",
            "run: found no folder nothing, expected the folder of a run of `cloze pretrain` or `cloze finetune`",
        ),
        (".", "run: found no config.yaml in the folder ., expected the folder of a run of `cloze pretrain` or"),
    ],
)
def test_what_is_no_run_is_said_in_plain_words(tmp_path, monkeypatch, capsys, given, expected):
    monkeypatch.chdir(tmp_path)
    assert main(["status", given]) == 2
    said = capsys.readouterr().err
    assert expected in said and "Error" not in said.removeprefix("error: ")


def test_runs_are_found_at_any_depth_and_not_inside_one_another(run, tmp_path, capsys):
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "link").symlink_to(run)  # links are not followed: they may go round
    with pytest.raises(UserError, match="found no run in the folder"):
        find_runs(tmp_path)
    with pytest.raises(UserError, match="found no folder"):
        find_runs(tmp_path / "none")
    assert find_runs(run.parents[1]) == [run] == find_runs(run)
    assert main(["runs", str(run.parent), "--json", str(tmp_path / "runs.json")]) == 0
    (found,) = json.loads((tmp_path / "runs.json").read_text())
    assert found["run"] == str(run) and found["state"] == "complete" and found["step"] == 4
    assert "complete" in capsys.readouterr().out
    assert main(["status", str(tmp_path)]) == 2 and "expected the folder of a run" in capsys.readouterr().err


def test_commands_that_look_import_no_torch(run):
    code = (
        "import sys; from cloze.launch.cli import main; "
        f"assert main(['status', {str(run)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_is_followed_to_its_end(run, tmp_path):
    """A run, watched by a process of its own from its first lines on: every line once, then how it ended."""
    data = run.parents[1] / "data"
    trained = ForkedRun(pretrain_arguments(data, tmp_path / "b", "--train.max_steps", "6"), main=slow_from(0))
    while not (tmp_path / "b" / "status.json").exists() or not (tmp_path / "b" / "config.yaml").exists():
        assert trained.poll() is None
        time.sleep(0.05)
    watched = subprocess.run(
        [sys.executable, "-m", "cloze", "status", str(tmp_path / "b"), "--follow", "--interval_seconds", "0.1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    finish(trained)
    lines = [line.split()[1] for line in watched.stdout.splitlines() if line.startswith("step ")]
    assert watched.returncode == 0 and watched.stdout.rstrip().endswith("complete at step 6"), watched.stdout
    assert lines == ["0/6", "1/6", "2/6", "3/6", "4/6", "5/6", "6/6", "6/6"], "each step, and two evaluations"


def test_the_lines_of_a_growing_file_are_shown_once_and_a_cut_one_never(tmp_path):
    """A kill cuts the last line; a resume replaces the file by a shorter one, which may have grown by the next look."""
    path = tmp_path / "metrics.jsonl"
    tail = _Tail(path, made_anew=False)
    assert tail.lines() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert tail.lines() == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.lines() == [{"step": 3}] and tail.lines() == []
    (tmp_path / "new").write_text("".join(f'{{"step": {step}}}\n' for step in range(40)))
    os.replace(tmp_path / "new", path)
    assert tail.lines()[-1] == {"step": 39} and tail.lines() == []
    path.write_text('{"step": 1}\n')
    assert tail.lines() == [{"step": 1}]


def test_a_value_that_was_not_finite_and_an_end_by_the_clock_are_shown(capsys):
    ProgressLine(Console(), estimates=False).show(7, None, {"train/loss": None, "validation/loss": 2.5})
    assert capsys.readouterr().out.split() == ["step", "7", "validation", "loss", "2.5000"]
