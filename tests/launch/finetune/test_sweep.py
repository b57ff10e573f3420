"""Several seeds and settings: what is run, and where; what failed; what they make together."""

import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.finetune.job import read_job
from cloze.launch.finetune.sweep import _NO_SETTINGS, _plan
from cloze.launch.pretrained.source import find_source
from cloze.launch.run import runs
from cloze.launch.run.sweeps import Run, combinations, run_all
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launch.finetune.running import arguments
from tests.launching import finish, kill_when, step_of, train
from tests.synthetic import make_shards


def test_every_combination():
    assert combinations([]) == [{}]
    assert combinations(["learning_rate=2e-5,3e-5", "epochs=1,2"]) == [
        {"train.learning_rate": rate, "epochs": epochs} for rate in ("2e-5", "3e-5") for epochs in ("1", "2")
    ]
    for wrong in (["learning_rate"], ["=1"], ["epochs=1,"], ["epochs=1,1"], ["seed=1,2"], ["epochs=1", "epochs=2"]):
        with pytest.raises(UserError, match="grid: found"):
            combinations(wrong, _NO_SETTINGS)


@pytest.mark.parametrize(
    "grid, said",
    [
        ("epoch=1,2", "did you mean --epochs?"),
        ("learning_rate=1e-3,-1", "found -1"),
        ("learning_rate=1e-3,fast", "fast"),
        ("max_length=16,65", "at most 64"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(model, files, tmp_path, capsys, grid, said):
    assert main(arguments("sst2", model, *files, tmp_path / "sweep", "--grid", grid)) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "sweep").exists()


def result(folder: Path, run: str) -> dict:
    return json.loads((folder / run / "results.json").read_text())


@pytest.mark.slow
def test_killed_and_started_again_it_repeats_no_finished_run_and_sums_all_up(model, files, tmp_path, capsys):
    """Two seeds of a setting that learns and of one that hardly moves, whose constant answers count as failed.

    Finished runs are no results of a sweep with another dropout.
    """
    folder = tmp_path / "sweep"
    words = arguments("sst2", model, *files, folder, "--seeds", 2, "--epochs", 3, "--grid", "learning_rate=3e-3,1e-12")
    names = [f"learning_rate={rate}/seed-{seed}" for rate in ("3e-3", "1e-12") for seed in (42, 43)]
    kill_when(
        ForkedRun(words), lambda: (folder / names[0] / "results.json").exists() and step_of(folder / names[1]) >= 5
    )
    written = (folder / names[0] / "results.json").stat().st_mtime_ns
    said = finish(ForkedRun(words))
    assert "1 of 4 runs are complete already" in said
    assert (folder / names[0] / "results.json").stat().st_mtime_ns == written
    summary = json.loads((folder / "results.json").read_text())
    assert [each["runs"] for each in summary["settings"]] == [names[:2], names[2:]]
    for each in summary["settings"]:
        values = [result(folder, run)["validation"]["accuracy"] for run in each["runs"]]
        measured = each["metrics"]["validation/accuracy"]
        assert list(measured["values"].values()) == values and measured["n"] == each["n"] == 2
        assert measured["median"] == pytest.approx(statistics.median(values))
        assert measured["mean"] == pytest.approx(sum(values) / 2)
        assert measured["deviation"] == pytest.approx(statistics.stdev(values))
        share = max(files[1].read_text().count(f"\t{label}\n") for label in "01") / 21
        assert list(each["failed"]) == [run for run, value in zip(each["runs"], values, strict=True) if value <= share]
    best = max(names, key=lambda run: result(folder, run)["validation"]["accuracy"])
    assert summary["best"]["run"] == {"value": result(folder, best)["validation"]["accuracy"], "name": best}
    assert summary["best"]["median"]["settings"] == {"train.learning_rate": "3e-3"}
    assert (folder / "spread.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / runs.STATUS).read_text())["state"] == "complete"
    assert main([*words, "--dropout", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "dropout" in error and "seed-42" in error


def scripted(folder: Path, name: str, awaited: Path | None = None) -> Run:
    return Run(name, folder / name, {}, [sys.executable, "-c", completing(folder / name, awaited)])


def completing(folder: Path, awaited: Path | None = None) -> str:
    """A script that completes a run once there is a file; without one, after a moment."""
    return COMPLETE.format(folder=str(folder), awaited=str(awaited or folder))


COMPLETE = """
import json, os, pathlib, time
here = pathlib.Path({folder!r})
here.mkdir(parents=True, exist_ok=True)
began = time.time()
(here / "began").touch()
time.sleep(0.2)
while not os.path.exists({awaited!r}):
    assert time.time() < began + 120
    time.sleep(0.01)
(here / "when").write_text(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), began, time.time()]))
(here / "results.json").write_text('{{"metric": "accuracy", "validation": {{"accuracy": 0.5}}}}')
(here / "aside").write_text('{{"state": "complete"}}')
os.replace(here / "aside", here / "status.json")  # as a run does: a sweep may read it at any moment
"""


@pytest.mark.parametrize("devices", [["0", "1"], ["3"]])
def test_one_run_at_a_time_on_each_device(tmp_path, devices):
    partners = dict(zip("abcd", "badc", strict=True)) if len(devices) > 1 else {}  # neither ends before both began
    planned = [scripted(tmp_path, name, partners and tmp_path / partners[name] / "began") for name in "abcd"]
    assert not run_all(planned, devices, Console(False))
    times = [json.loads((run.folder / "when").read_text()) for run in planned]
    assert {device for device, _, _ in times} == set(devices)
    for device in devices:
        own = sorted((began, ended) for used, began, ended in times if used == device)
        assert len(own) == 4 // len(devices)
        assert all(ended <= began for (_, ended), (began, _) in zip(own, own[1:], strict=False))
    overlaps = sum(a[1] < b[2] and b[1] < a[2] for n, a in enumerate(times) for b in times[:n])
    assert (overlaps > 0) == (len(devices) > 1)


def test_a_run_that_a_killed_sweep_has_left_at_work_is_waited_for(tmp_path):
    """It holds its folder's lock and ends by itself: it is not started a second time, and no other beside it."""
    planned, said = [scripted(tmp_path, name) for name in "ab"], []
    console, waiting = Console(), tmp_path / "waiting"
    console.say = lambda line: (said.append(line), waiting.touch())
    (tmp_path / "a").mkdir()
    holding = f"import fcntl, time\nfile = open({str(tmp_path / 'a' / runs.LOCK)!r}, 'w')\nfcntl.flock(file, 2)\n"
    orphan = subprocess.Popen([sys.executable, "-c", holding + completing(tmp_path / "a", waiting)])
    while not runs.in_use(tmp_path / "a"):
        assert orphan.poll() is None
        time.sleep(0.01)
    assert not run_all(planned, [""], console)
    assert orphan.wait() == 0 and "waiting for a, still at work" in said[0]
    assert not planned[0].log.exists() and planned[1].results()
    ended = json.loads((tmp_path / "a" / "when").read_text())[2]
    assert json.loads((tmp_path / "b" / "when").read_text())[1] >= ended


def test_all_runs_start_from_one_checkpoint_of_a_pretraining_that_goes_on(files, tmp_path):
    """The newest at their start, also where a newer one is saved before a run begins or goes on."""
    train(make_shards(tmp_path / "data"), tmp_path / "old", "--train.max_steps", "4", "--checkpoint.every_steps", "2")
    newest, hidden = (tmp_path / "old" / "checkpoints" / name for name in ("step-00000004", "hidden"))
    single, words = (
        arguments("sst2", tmp_path / "old", *files, tmp_path / name, "--epochs", 0.1, "--seeds", seeds)
        for name, seeds in (("single", 1), ("sweep", 2))
    )
    newest.rename(hidden)
    finish(ForkedRun(single))
    planned = _plan(parse("finetune", words[1:]), read_job)
    hidden.rename(newest)
    said = finish(ForkedRun(single))
    assert f"{tmp_path / 'old'}, step 2; initialized" in " ".join(said.replace("│", " ").split())
    assert json.loads((tmp_path / "single" / "results.json").read_text())["model_step"] == 2

    def steps(planned):
        return [
            find_source(parse("finetune", run.command[run.command.index("finetune") + 1 :])).step for run in planned
        ]

    assert steps(planned) == [2, 2]
    assert steps(_plan(parse("finetune", words[1:]), read_job)) == [2, 2], "of the same one started again"
    grid = [*words[1:], "--grid", "model_step=2,null"]
    asked = steps(_plan(parse("finetune", grid), read_job))
    assert asked == [2, 2, 4, 4], "a step that is asked for is that setting's own"
    shutil.copytree(tmp_path / "old", tmp_path / "other")
    other = [word.replace(str(tmp_path / "old"), str(tmp_path / "other")) for word in words[1:]]
    assert steps(_plan(parse("finetune", other), read_job)) == [4, 4], "nor does another model begin where that one did"


def test_a_stop_is_passed_on_and_the_sweep_asks_to_be_queued_again(model, files, tmp_path):
    folder = tmp_path / "sweep"
    process = ForkedRun(arguments("sst2", model, *files, folder, "--seeds", 2, "--epochs", 200))
    while step_of(folder / "seed-42") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "seed-42: stopped" in finish(process, 75)
    assert json.loads((folder / "seed-42" / runs.STATUS).read_text())["state"] == "requeue"
    assert json.loads((folder / runs.STATUS).read_text())["state"] == "requeue"
    assert not (folder / "seed-43").exists()


def test_seeds_under_torchrun_are_refused(model, files, tmp_path, monkeypatch, capsys):
    torchruns = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, value)
    assert main(arguments("sst2", model, *files, tmp_path / "sweep", "--seeds", 2)) == 2
    assert "seeds, grid: found them in a run of 2 processes" in capsys.readouterr().err
