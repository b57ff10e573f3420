"""The runs of a sweep, one at a time on a device."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from cloze.launch.run import integrity, runs
from cloze.launch.run.preemption import StopRequest
from cloze.launch.run.run_locks import in_use
from cloze.launch.sweeps import pool
from cloze.launch.sweeps.pool import _start, run_all
from cloze.launch.sweeps.run import Run, claim, fault_in_runs, is_claimed
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from tests.launch.sweeps.scripted_runs import completing, configured, scripted


@pytest.mark.parametrize("devices", [["0", "1"], ["3"]])
def test_one_run_at_a_time_on_each_device(tmp_path, devices):
    partners = dict(zip("abcd", "badc", strict=True)) if len(devices) > 1 else {}  # neither ends before both began
    planned = [scripted(tmp_path, name, partners and tmp_path / partners[name] / "began") for name in "abcd"]
    assert not run_all(planned, devices, StopRequest(), Console(False))
    times = [json.loads((run.folder / "when").read_text()) for run in planned]
    assert {device for device, _, _ in times} == set(devices)
    for device in devices:
        own = sorted((began, ended) for used, began, ended in times if used == device)
        assert len(own) == 4 // len(devices)
        assert all(ended <= began for (_, ended), (began, _) in zip(own, own[1:], strict=False))
    overlaps = sum(a[1] < b[2] and b[1] < a[2] for n, a in enumerate(times) for b in times[:n])
    assert (overlaps > 0) == (len(devices) > 1)


def test_a_pipe_in_the_place_of_a_log_is_refused(tmp_path):
    """It waited for a reader without end."""
    run = scripted(tmp_path, "a")
    os.mkfifo(run.log)
    with pytest.raises(UserError, match="a.log: found no regular file, expected one; remove it"):
        run_all([run], [""], StopRequest(), Console(False))


def test_the_run_at_work_is_named_with_its_step_and_loss(tmp_path, capsys):
    run = scripted(tmp_path, "b")
    run.folder.mkdir()
    lines = '{"step": 6, "train/loss": 3.0}\n{"step": 7, "train/loss": 2.5}\n{"step": 7, "validation/loss": 2.0}\n'
    (run.folder / runs.METRICS).write_text("x" * 70000 + "\n" + lines + '{"step": 8, "tr')
    done = scripted(tmp_path, "a")
    exec(completing(done.folder))  # noqa: S102
    assert not run_all([done, run], [""], StopRequest(), Console())
    printed = capsys.readouterr()
    assert f"run 2 of 2, b begins; its output: {run.log}" in printed.out
    assert printed.err == "run 2 of 2, b: step 7, loss 2.5000\n"


@pytest.mark.parametrize(
    ("made", "planned", "found"),
    [
        ({"samples": 100}, {}, "evaluation.samples 100, expected"),
        ({}, {"masking_rate": 0.3}, "evaluation.masking_rate None, expected 0.3"),
        ({"sets": {"old": "folder"}}, {}, "evaluation.sets.old folder, expected None"),
        ({"sets": {"news": "folder"}}, {"sets": {"news": "moved"}}, None),
        ({"metric": "mlm_accuracy"}, {}, "evaluation.metric mlm_accuracy, expected loss"),
        ({"every_steps": 7}, {}, None),
        (
            {"every_steps": 7, "patience": 2},
            {"patience": 2},
            "evaluation.every_steps 7, expected",
        ),
    ],
)
def test_runs_that_were_measured_otherwise_are_in_no_table_together(tmp_path, capsys, made, planned, found):
    """Nor is one that has lost what its command writes again, and would not be measured again."""
    run = scripted(tmp_path, "a")
    exec(completing(run.folder))  # noqa: S102
    (run.folder / runs.CONFIG).write_text(yaml.safe_dump(asdict(configured({"evaluation": made}))))
    (run.folder / runs.METRICS).write_text("{}\n")
    (run.folder / runs.DATA).write_text('{"validation_set_hash.news": "1"}')
    run = replace(run, config=configured({"evaluation": planned}, run.folder), facts={"validation_set_hash.news": "1"})
    if found is None:
        assert not run_all([run], [""], StopRequest(), Console())
    else:
        assert fault_in_runs([run]).startswith(f"{run.folder}: found a complete run with {found}")
        (run.folder / "model/config.json").unlink()
        with pytest.raises(UserError, match=f"a: found a complete run with {found}"):
            run_all([run], [""], StopRequest(), Console())


def test_a_run_that_was_measured_on_another_set_of_this_name_is_in_no_table(tmp_path):
    run = scripted(tmp_path, "a")
    exec(completing(run.folder))  # noqa: S102
    (run.folder / runs.DATA).write_text('{"validation_set_hash.news": "1", "validation_set_hash.old": "2"}')
    run = replace(run, config=configured({}, run.folder), facts={"validation_set_hash.news": "1"})
    run.check()
    with pytest.raises(UserError, match="with validation_set_hash.news 1, expected 3: it is not measured again"):
        replace(run, facts={"validation_set_hash.news": "3"}).check()


@pytest.mark.parametrize("made", [{"patience": 2}, {"target": 0.5}])
def test_a_run_that_has_another_end_at_the_end_is_in_no_table(tmp_path, made):
    """It was begun again, and could not go on."""
    run = scripted(tmp_path, "a")
    exec(completing(run.folder))  # noqa: S102
    (run.folder / runs.METRICS).write_text("{}\n")
    (run.folder / runs.CONFIG).write_text(yaml.safe_dump(asdict(configured({"evaluation": made}))))
    run = replace(run, config=configured({}, run.folder))
    run.check()
    assert "a: found a run that has ended with evaluation." in fault_in_runs([run])


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_a_run_whose_model_was_cut_is_run_again(tmp_path, capsys, lost):
    run, other = scripted(tmp_path, "a"), scripted(tmp_path, "b")
    for each in (run, other):
        exec(completing(each.folder))  # noqa: S102
        save_file({"weight": np.zeros(9)}, each.folder / "model/model.safetensors")
        results = json.loads((each.folder / runs.RESULTS).read_text())
        hashes = {runs.MODEL_HASHES: integrity.hashes_of_model(each.folder)}
        (each.folder / runs.RESULTS).write_text(json.dumps(results | hashes))
    assert run.measured
    path = run.folder / "model" / lost
    os.truncate(path, path.stat().st_size - 1)
    what = f"{path}: found another file, expected it as the run has written it"
    assert fault_in_runs([run]) == f"{what}: something was removed meanwhile; the same command writes it again"
    assert not run_all([run, other], [""], StopRequest(), Console()) and (run.folder / "when").stat().st_size
    printed = capsys.readouterr()
    assert f"warning: {what}; the run is started again" in printed.err
    assert "1 of 2 runs are complete already" in printed.out and "run 1 of 2, a begins" in printed.out


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_a_killed_sweep_has_left_at_work_is_waited_for(tmp_path, begun):
    """It holds its folder's lock, or imports yet and holds that of its output, and ends by itself: it is not started a
    second time, and no other beside it.
    """
    planned, said = [scripted(tmp_path, name) for name in "ab"], []
    console, waiting = Console(), tmp_path / "waiting"
    console.say = lambda line: (said.append(line), waiting.touch())
    (tmp_path / "a").mkdir()
    holding = f"import fcntl, time\nfile = open({str(tmp_path / 'a' / runs.LOCK)!r}, 'w')\nfcntl.flock(file, 2)\n"
    program = [sys.executable, "-c", holding * begun + completing(tmp_path / "a", waiting)]
    orphan = subprocess.Popen(program) if begun else _start(replace(planned[0], command=program), "")
    (tmp_path / "a.yaml").touch()
    while begun and not in_use(tmp_path / "a"):
        assert orphan.poll() is None
        time.sleep(0.01)
    assert not run_all(planned, [""], StopRequest(), console)
    assert orphan.wait() == 0 and "waiting for a, still at work" in said[0]
    assert planned[0].log.exists() != begun and planned[1].results()
    ended = json.loads((tmp_path / "a" / "when").read_text())[2]
    assert json.loads((tmp_path / "b" / "when").read_text())[1] >= ended


def test_a_run_that_another_command_has_begun_otherwise_is_not_taken_for_ones_own(tmp_path, monkeypatch):
    """As `cloze sweep --run` with other settings: what it has begun is neither begun again nor given its settings, and
    the sweep does not count it; also where it ends between two looks at it.
    """
    waiting, run = tmp_path / "waiting", scripted(tmp_path, "a", tmp_path / "waiting")
    config = configured({"optimizer": {"weight_decay": 0.7}}, run.folder)
    own = replace(run, configuration="of this command", config=config)
    console, said = Console(), []
    console.say = said.append
    looks = []

    def claimed(run: Run) -> bool:
        looks.append(run)
        if len(looks) == 2:
            waiting.touch()
            assert other.wait() == 0
        return is_claimed(run)

    monkeypatch.setattr(pool, "is_claimed", claimed)
    with claim(replace(own, configuration="of the other")) as log:
        other = subprocess.Popen(own.command, stdout=log)
        assert claim(own) is None
    assert not run_all([own], [""], StopRequest(), console)
    (own.folder / runs.METRICS).write_text("{}\n")
    assert len(looks) >= 2 and "waiting for a, still at work" in said[0]
    assert (tmp_path / "a.yaml").read_text() == "of the other"
    assert "with another run, whose optimizer.weight_decay is 0.01, expected 0.7" in fault_in_runs([own])
    with pytest.raises(UserError, match=r"whose optimizer.weight_decay is 0.01, expected 0.7"):
        run_all([own], [""], StopRequest(), console)  # made between this one's plan and its lock


@pytest.mark.parametrize("here", [True, False])
def test_a_complete_run_that_is_begun_again_meanwhile_counts(tmp_path, here):
    """As an element of an array that is queued again: for some seconds it was no complete one. here: whether the sweep
    has run it before.
    """
    again, other = scripted(tmp_path, "a", tmp_path / "waiting"), scripted(tmp_path, "b")
    if here:
        again = replace(again, command=[sys.executable, "-c", completing(again.folder, tmp_path)])
    else:
        exec(completing(again.folder, tmp_path))  # noqa: S102
    console, said, begun = Console(), [], []

    def say(line: str) -> None:
        said.append(line)
        if "b begins" in line:
            with claim(again) as log:
                (again.folder / runs.STATUS).write_text('{"state": "running"}')
                waits = [sys.executable, "-c", completing(again.folder, tmp_path / "waiting")]
                begun.append(subprocess.Popen(waits, stdout=log))
        if "waiting for a" in line:
            (tmp_path / "waiting").touch()

    console.say = say
    assert not run_all([again, other], [""], StopRequest(), console)
    assert (
        begun[0].wait() == 0 and again.results() and other.results() and any("waiting for a" in line for line in said)
    )


def test_a_complete_run_whose_next_start_was_killed_meanwhile_is_begun_again(tmp_path):
    """It was missing from the table, though the sweep had completed it."""
    planned, console, said = [scripted(tmp_path, "a"), scripted(tmp_path, "b")], Console(), []

    def say(line: str) -> None:
        said.append(line)
        if "b begins" in line:
            (planned[0].folder / runs.STATUS).write_text('{"state": "running"}')

    console.say = say
    assert not run_all(planned, [""], StopRequest(), console)
    assert planned[0].results() and planned[1].results() and sum("a begins" in line for line in said) == 2


def test_a_run_that_is_stopped_alone_stops_the_sweep(tmp_path, capsys):
    """By the end of the job's time, which the sweep does not know: the job has to be queued again."""
    planned = [replace(scripted(tmp_path, "a"), command=[sys.executable, "-c", "exit(75)"]), scripted(tmp_path, "b")]
    assert run_all(planned, [""], StopRequest(), Console())
    assert "a: stopped, to be continued" in capsys.readouterr().err and not planned[1].log.exists()


def test_runs_at_work_are_stopped_when_another_can_not_be_started(tmp_path):
    """They were left behind, unwatched."""
    at_work = replace(scripted(tmp_path, "a"), command=["sleep", "600"])
    with pytest.raises(FileNotFoundError):
        run_all(
            [at_work, replace(at_work, folder=tmp_path / "b", command=["/no/such"])],
            ["0", "1"],
            StopRequest(),
            Console(),
        )
    assert at_work.log.exists() and not is_claimed(at_work)
