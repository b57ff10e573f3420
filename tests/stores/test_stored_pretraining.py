"""Pretraining into a store: killed in an upload, gone on from empty disks, with faults between it and the store."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cloze.launch.checkpoint.fetching import fetch_run, read_index
from cloze.launch.checkpoint.weights import read_weights
from cloze.launch.cli import main
from cloze.launch.run.commits import read_commits
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.stored_run import COMMITS
from cloze.pipeline.stores.places import to_place
from tests.launch.run.test_trackers import history
from tests.launching import NO_DROPOUT, assert_same_weights, children, finish, kill_all, train, weights
from tests.stores.conftest import ENVIRONMENT
from tests.stores.server import BUSY, first, slow
from tests.stores.stored_runs import (
    PATIENCE,
    Machine,
    assert_nothing_but_what_counts,
    committed,
    finish_all,
    keys,
    read_log,
    start_on,
    told_state,
    train_on,
    wait_until,
)
from tests.synthetic import make_shards

STEPS = 16
RUN = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", "4", "--zero.stage", "1", "--ema.decay", "0.9")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("stored"), mask_sets=0)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """A run of two processes into a folder."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(data, folder, *RUN, processes=2)
    return folder


@pytest.fixture
def machines(tmp_path):
    """As many empty machines as are asked for."""
    made = []

    def more(count: int) -> list[Machine]:
        made.extend([Machine(tmp_path / f"machine-{len(made) + number}") for number in range(count)])
        return made[-count:]

    return more


def assert_no_secrets(output: str, printed: str) -> None:
    """That neither what was printed nor what was stored has a part of the credentials."""
    place = to_place(output)
    texts = [printed.encode(), *(place.at(each.key).read_bytes() for each in place.objects())]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert not any(ENVIRONMENT[name].encode() in text for text in texts)


def assert_one_curve(output: str, folder: Path, steps: int) -> None:
    """That what arrived of the curves has each step once, in metrics.jsonl and for TensorBoard, with equal values."""
    lines = {line["step"]: line["train/loss"] for line in read_log(output) if "train/loss" in line}
    assert [line["step"] for line in read_log(output) if "train/loss" in line] == list(range(1, steps + 1))
    assert main(["status", output, "--curves", str(folder)]) == 0
    assert read_metrics(folder) == read_log(output)
    board = EventAccumulator(str(folder)).Reload()
    assert {event.step: event.value for event in board.Scalars("train/loss")} == pytest.approx(lines, rel=1e-6)
    assert len(board.Scalars("train/loss")) == steps


def test_killed_in_an_upload_and_gone_on_with_from_empty_disks(
    data, undisturbed, machines, bucket, proxy, request, tmp_path
):
    """Two machines that share nothing; those that go on have empty disks."""
    output, ended = f"{bucket}/runs/own", threading.Event()
    request.addfinalizer(ended.set)

    def stuck(request):  # the second checkpoint's upload begins, and does not end
        if request.method == "PUT" and "/step-00000008/" in request.path and "rank-00001" in request.path:
            ended.wait()

    proxy.fault = stuck
    # So slowly that each upload has ended before the next checkpoint, which would be left out for a newer one.
    processes = start_on(machines(2), data, output, *RUN, step_seconds=0.4)
    uploaded = f"{output}/checkpoints/step-00000008"
    wait_until(lambda: to_place(uploaded).is_dir() and committed(output) == [4], processes[0])
    for process in processes:
        kill_all(process)
    proxy.fault = lambda request: None
    assert any("mp_rank_00_model_states" in key for key in keys(uploaded))
    printed = finish_all(start_on(machines(2), data, output, *RUN, step_seconds=0.4))
    assert "resumed from step 4 of 16" in printed and "was uploaded after" in printed
    assert committed(output) == [12, 16]
    assert_nothing_but_what_counts(output)
    assert_no_secrets(output, printed)
    assert_one_curve(output, tmp_path / "curves", STEPS)
    local = fetch_run(to_place(output), warn=print)
    assert_same_weights(weights(local), weights(undisturbed))
    assert_same_weights(*(read_weights(run, None, print, ema=True)[1] for run in (local, undisturbed)))


def test_a_refused_delete_is_a_warning(data, machines, bucket, proxy):
    """The run goes on; what stays of an old checkpoint counts for nothing, and goes with the next start."""
    output, (machine,) = f"{bucket}/own", machines(1)
    refused = 403, {"Content-Length": "0"}, b""
    proxy.fault = lambda request: (lambda _: refused) if "?delete" in request.path else None
    printed = finish(
        machine.start(
            data,
            output,
            "--train.max_steps",
            "3",
            "--checkpoint.every_steps",
            "1",
            "--checkpoint.keep_last",
            "1",
            step_seconds=0.5,
        )
    )
    assert "complete at step 3" in printed and "an old checkpoint could not be removed (" in printed
    proxy.fault = lambda request: None
    assert committed(output) == [3]


@pytest.mark.slow
def test_503s_and_cut_connections_are_no_harm(data, undisturbed, machines, bucket, proxy):
    """The first request for each object is answered with 503, the second one cut off after it was done."""
    output = f"{bucket}/own"
    cut = first(1, lambda _: None, lambda request: request.method == "PUT")
    busy = first(1, lambda _: BUSY, lambda request: request.method != "PUT")
    proxy.fault = lambda request: busy(request) or cut(request)
    (machine,) = machines(1)
    # So slowly that repeated uploads keep up on a busy machine, and none is left out for a newer one.
    printed = finish(machine.start(data, output, *RUN, processes=2, step_seconds=0.5))
    assert "warning" not in printed.replace("warning: s3", "")
    proxy.fault = lambda request: None
    assert committed(output) == [12, 16]
    assert_nothing_but_what_counts(output)
    assert_same_weights(weights(fetch_run(to_place(output), warn=print)), weights(undisturbed))


SHORT = ("--train.max_steps", "12", "--checkpoint.every_steps", "3")


def test_a_store_that_is_away_for_a_while_and_for_good(data, machines, bucket, proxy):
    """The training goes on meanwhile; for good, the checkpoint stays on scratch, where the same command takes it up."""
    output, away = f"{bucket}/own", []

    def fault(request):
        if "/step-00000003/" in request.path and not away:
            away.append(time.monotonic())
        if "/checkpoints/" in request.path and away and time.monotonic() - away[0] < 3:
            return lambda _: BUSY
        return (lambda _: BUSY) if "/step-00000012/" in request.path else None

    proxy.fault = fault
    (machine,) = machines(1)
    process = machine.start(data, output, *SHORT, PATIENCE, "6", step_seconds=0.4)
    printed = finish(process, 2)
    assert "training continues" in printed and "the store answers again" in printed
    assert "step 12/12" in printed and printed.count("error: ") == 1
    assert "503 Service Unavailable" in printed.partition("error: ")[2]
    assert "checkpoints/step-00000012" in printed.partition("error: ")[2]
    before = committed(output)
    assert before and 12 not in before
    proxy.fault = lambda request: None
    printed = train_on(machine, data, output, *SHORT)
    assert "step 12 is on this machine's scratch" in printed and "resumed from step 12 of 12" in printed
    assert committed(output)[-1] == 12
    assert_nothing_but_what_counts(output)
    steps = [line["step"] for line in read_log(output) if "train/loss" in line]
    assert steps == list(range(1, 13))


@pytest.mark.slow
def test_a_run_that_can_not_hold_its_lease_saves_and_ends(data, undisturbed, machines, bucket, proxy):
    """Two machines, and no answer from the store at a moment when no checkpoint is due: another job might take the run
    up from then on. A short silence before is no harm. The next start on these machines need not wait for the lease."""
    output, silent = f"{bucket}/own", [0.0, 0.0]  # from when to when

    proxy.away = lambda request: silent[0] <= time.monotonic() < silent[1]
    run = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", "0", *RUN[4:])
    two = machines(2)
    processes = start_on(two, data, output, *run, PATIENCE, "3", step_seconds=0.8)
    wait_until(lambda: any("/metrics.jsonl." in key for key in keys(output)), processes[0])
    now = time.monotonic()
    silent[:] = now, now + 1.5
    time.sleep(2.5)
    silent[:] = time.monotonic(), float("inf")
    printed = finish_all(processes, 2)
    assert printed.count("error: ") == 1 and "the run's lease can't be renewed (" in printed
    assert "store_patience_seconds = 3" in printed
    last = max(map(int, re.findall(r"step (\d+)/16", printed)))
    assert f"checkpoints/step-{last:08d}" in printed.partition("error: ")[2]
    proxy.away = lambda request: False
    assert committed(output) == []
    printed = finish_all(start_on(two, data, output, *run))
    assert f"step {last} is on the scratch of 2 machines" in printed and "watching" not in printed
    assert [line["step"] for line in read_log(output) if "train/loss" in line] == list(range(1, STEPS + 1))
    assert_same_weights(weights(fetch_run(to_place(output), warn=print)), weights(undisturbed))


@pytest.mark.slow
def test_the_store_goes_when_the_last_checkpoint_is_there(data, machines, bucket, proxy):
    """Two processes. What the run tells at its end arrives when the store is back; where it stays away the run is
    complete all the same, says what the store lacks, and the same command sends it."""
    output, back = f"{bucket}/own", [3.0]  # seconds after the end of the training
    ended: list[float] = []

    def away(request):
        if request.method == "PUT" and "/log/" in request.path and committed(output)[-1:] == [4]:
            ended.append(time.monotonic())
        return bool(ended) and time.monotonic() - ended[0] < back[0]

    run = ("--train.max_steps", "4", "--checkpoint.every_steps", "0", "--monitor.trackers", "[]")
    (machine,) = machines(1)
    proxy.away = away
    printed = train_on(machine, data, output, *run, processes=2)
    assert ended and "complete at step 4" in printed and "nor its last curves" not in printed
    assert told_state(output) == "complete"
    output, back[0] = f"{bucket}/other", float("inf")
    ended.clear()
    printed = train_on(machine, data, output, *run, PATIENCE, "2", processes=2)
    assert ended and "complete at step 4" in printed and printed.count("nor its last curves (s3://") == 1
    proxy.away = lambda request: False
    assert told_state(output) == "running" and committed(output) == [4]
    printed = train_on(machine, data, output, *run, processes=2)
    assert "complete at step 4" in printed and "watching" not in printed
    assert told_state(output) == "complete"
    assert [line["step"] for line in read_log(output) if "train/loss" in line] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_store_that_is_away_for_a_whole_minute(data, machines, bucket, proxy):
    """With the limits of every run. Two machines: training goes on, the newest of the checkpoints that are due waits,
    the lease holds, and in the end everything is there as if nothing had been."""
    output, begun = f"{bucket}/own", []
    run = ("--train.max_steps", "260", "--checkpoint.every_steps", "20", "--zero.stage", "1")

    def away(request):
        if "/step-00000040/" in request.path and not begun:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] < 60

    proxy.away = away
    printed = finish_all(start_on(machines(2), data, output, *run, step_seconds=0.3, quick=False))
    assert begun and time.monotonic() - begun[0] > 60
    assert "training continues" in printed and printed.count("the store answers again") >= 1
    assert "complete at step 260" in printed and "error: " not in printed
    steps = [line["step"] for line in read_log(output) if "train/loss" in line]
    assert steps == list(range(1, 261)) and told_state(output) == "complete"
    sent = sorted(
        {
            request.path.partition("/step-")[2][:8]
            for request in proxy.requests
            if request.method == "PUT" and "/step-" in request.path
        }
    )
    assert sent[:2] == ["00000020", "00000040"] and int(sent[2]) > 60  # those between were left out
    assert_nothing_but_what_counts(output)
    folder = machines(1)[0].folder / "undisturbed"
    train(data, folder, *run, processes=2)
    assert_same_weights(weights(fetch_run(to_place(output), warn=print)), weights(folder))


def test_the_newest_checkpoint_wins_where_uploads_lag(data, machines, bucket, proxy, capsys):
    output = f"{bucket}/own"
    late = slow(1.0)
    proxy.fault = lambda request: late if request.method == "PUT" and "/step-" in request.path else None
    (machine,) = machines(1)
    train_on(machine, data, output, "--train.max_steps", "12", "--checkpoint.every_steps", "1")
    begun = {
        request.path.partition("/step-")[2][:8]
        for request in proxy.requests
        if request.method == "PUT" and "/step-" in request.path
    }
    assert 2 <= len(begun) < 10 and max(begun) == "00000012"
    assert committed(output)[-1] == 12 and len(committed(output)) == 2
    assert_nothing_but_what_counts(output)
    assert not list(machine.folder.rglob("*.pt"))  # it is complete
    assert main(["status", output, "--follow", "true"]) == 0
    told = capsys.readouterr().out
    assert "complete at step 12" in told and "step 12/12  validation loss" in told
    assert main(["runs", bucket]) == 0
    assert "12 of 12" in capsys.readouterr().out
    assert f"output: {output}\n" in (to_place(output) / "config.yaml").read_text()
    proxy.fault = lambda request: None
    export = machine.folder / "hf"
    assert main(["export", output, "--output", str(export)]) == 0
    assert f"exported step 12 of {output} to {export}" in capsys.readouterr().out
    assert main(["status", f"{output}-none"]) == 2
    assert f"{output}-none: found no run there" in capsys.readouterr().err


def test_two_machines_go_on_from_their_scratch_if_both_have_it(data, undisturbed, machines, bucket, proxy):
    """With a checkpoint in every step on scratch and one in eight in the store. What all processes need is on the first
    machine's disk alone."""
    output, two = f"{bucket}/own", machines(2)
    run = (*RUN[:2], "--zero.stage", "1", "--checkpoint.every_steps", "8", "--checkpoint.local", "1")

    def last(machine: Machine) -> int:
        found = machine.folder.glob("cache/cloze/runs/*/checkpoints/step-*[0-9]")
        return max((int(path.name[5:]) for path in found), default=0)

    def killed(at: int) -> tuple[str, int]:
        """Killed when both have that step; what was printed, and the last step that both have."""
        processes = start_on(two, data, output, *run, step_seconds=0.3)
        try:
            wait_until(lambda: min(map(last, two)) >= at, processes[0])
        finally:
            for process in processes:
                kill_all(process)
        return finish(processes[0], None), min(map(last, two))

    _, both = killed(11)
    assert committed(output) == [8]
    proxy.requests.clear()
    printed, _ = killed(both + 1)
    assert f"step {both} is on the scratch of 2 machines" in printed and f"resumed from step {both} of" in printed
    assert not any(request.method == "GET" and "/step-" in request.path for request in proxy.requests)
    (two[1],) = machines(1)
    newest = committed(output)[-1]
    printed = finish_all(start_on(two, data, output, *run))
    assert "scratch" not in printed and f"resumed from step {newest} of" in printed
    assert_nothing_but_what_counts(output)
    assert_one_curve(output, machines(1)[0].folder / "curves", STEPS)
    assert_same_weights(weights(fetch_run(to_place(output), warn=print)), weights(undisturbed))


@pytest.mark.slow  # importing both libraries takes longer than the runs
def test_a_run_that_goes_on_from_an_empty_disk_stays_in_its_curves(data, machines, bucket, tmp_path, monkeypatch):
    """Of metrics.jsonl, TensorBoard, MLflow and wandb (offline): killed, and nothing is left of its disk for the next
    start but what the trackers keep themselves."""
    output, database, every = f"{bucket}/own", tmp_path / "mlflow.db", 20
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    run = (
        "--monitor.trackers",
        "[tensorboard, wandb, mlflow]",
        "--checkpoint.every_steps",
        str(every),
        "--schedule.name",
        "constant",
        "--schedule.warmup_steps",
        "5",
    )
    one, other = machines(2)

    def sent() -> dict:
        """By tracker, as the killed machine knows it."""
        found = one.folder.glob("cache/cloze/runs/*/*/*/trackers.json")
        return next((json.loads(path.read_text()) for path in found), {})

    def both_have(step: int) -> bool:
        return len(sent()) == 2 and all(each["sent"].get("train/loss", -1) >= step for each in sent().values())

    process = one.start(data, output, *run, "--train.max_steps", "100000", step_seconds=0.05)
    try:
        wait_until(lambda: both_have(1), process)
        known = max(each["sent"]["train/loss"] for each in sent().values()) + every  # in whose checkpoint both are
        # Steps that the trackers have and a resume does again, with the newest checkpoint at some distance.
        wait_until(
            lambda: max(committed(output), default=0) > known and both_have(committed(output)[-1] + every // 2), process
        )
    finally:
        kill_all(process)
    printed, ids = finish(process, None), {name: each["id"] for name, each in sent().items()}
    step, place = committed(output)[-1], to_place(output) / "checkpoints"
    index = read_index(place, step, read_commits(place / COMMITS)[step])
    assert {name: each["id"] for name, each in index["state"]["trackers"].items()} == ids, printed
    # As where the newest pieces of what is beside the checkpoints have not arrived.
    log = to_place(output) / "log"
    log.writer.delete([each.key for each in log.objects() if "/trackers.json." in each.key])
    last = step + 5 * every
    train_on(other, data, output, *run, "--train.max_steps", str(last), "--checkpoint.accept_changes", "true")
    assert_one_curve(output, tmp_path / "curves", last)
    expected = {line["step"]: line["train/loss"] for line in read_log(output) if "train/loss" in line}
    with sqlite3.connect(database) as found:
        rows = found.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        assert found.execute("select run_uuid, status from runs").fetchall() == [(ids["mlflow"], "FINISHED")]
    steps = [number for number, _ in rows]
    assert len(set(steps)) == len(steps) >= last - 1 and dict(rows) == pytest.approx(
        {number: expected[number] for number in steps}, rel=1e-6
    )
    found = [path for machine in (one, other) for path in machine.folder.rglob("offline-run-*") if path.is_dir()]
    assert len(found) == 2 and {path.name.rpartition("-")[2] for path in found} == {ids["wandb"]}
    # In order, as `wandb sync` sends them; its server takes no step twice.
    curve = [
        point for machine in (one, other) for path in machine.folder.rglob("wandb") for point in history(path.parent)
    ]
    # It writes in a process of its own, some lines late: those of the moment of the kill are lost.
    assert len(set(range(1, last + 1)) - {number for number, _ in curve}) <= every and max(curve)[0] == last
    assert dict(curve) == pytest.approx({number: expected[number] for number, _ in curve}, rel=1e-6)


@pytest.mark.slow
def test_moments_of_another_number_of_processes_are_converted_on_each_machine(data, machines, bucket, tmp_path):
    """The run that they come from lies where each machine sees it, in a folder or in the store; what is made of it does
    not."""
    run = ("--zero.stage", "1", "--train.max_steps", "4")
    moments = (*run, "--init_optimizer", "true", "--init_from")
    train(data, tmp_path / "source", *run)
    train(data, tmp_path / "shared", *moments, str(tmp_path / "source"), processes=2)
    train_on(*machines(1), data, f"{bucket}/source", *run)
    for number, source in enumerate((str(tmp_path / "source"), f"{bucket}/source")):
        two, output = machines(2), f"{bucket}/own-{number}"
        printed = finish_all(start_on(two, data, output, *moments, source))
        assert f"step 4 of {source} was saved by another number of processes: converting it" in printed
        assert "taken, of 4 steps" in printed
        assert_same_weights(weights(fetch_run(to_place(output), warn=print)), weights(tmp_path / "shared"))
        assert not [path for machine in two for path in machine.folder.rglob("step-*")]


@pytest.mark.slow
def test_what_a_run_began_with_stays_with_it_on_another_machine(data, machines, bucket, tmp_path):
    """The model folder is gone when it goes on there, and its export has what that folder had."""
    train(data, tmp_path / "source", "--train.max_steps", "1")
    assert main(["export", str(tmp_path / "source"), "--output", str(tmp_path / "released")]) == 0
    config = tmp_path / "released/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"of_another_tool": 1}))
    output, begun = f"{bucket}/own", ("--checkpoint.accept_changes", "true", "--init_from", str(tmp_path / "released"))
    train_on(*machines(1), data, output, *begun, "--train.max_steps", "2")
    shutil.rmtree(tmp_path / "released")
    assert "resumed from step 2" in train_on(*machines(1), data, output, *begun, "--train.max_steps", "4")
    assert main(["export", output, "--output", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["of_another_tool"] == 1
    (to_place(output) / "origin/config.json").unlink()
    assert "config.json: found no such file" in train_on(
        *machines(1), data, output, *begun, "--train.max_steps", "6", status=2
    )


def send(processes: list[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


@pytest.mark.slow
def test_an_old_job_that_wakes_up_cannot_commit(data, machines, bucket):
    output = f"{bucket}/own"
    one, other = machines(2)
    old = one.start(data, output, *SHORT, step_seconds=0.5)
    wait_until(lambda: committed(output) == [3], old)
    processes = [old.pid, *children(old.pid)]
    send(processes, signal.SIGSTOP)
    printed = train_on(other, data, output, *SHORT)
    assert "watching for 6 s whether it lives" in printed and "resumed from step 3 of 12" in printed
    assert committed(output) == [9, 12]
    send(processes, signal.SIGCONT)
    printed = finish(old, 2)
    assert "held by another job" in printed or "taken over by another job" in printed
    assert printed.count("error: ") == 1
    assert committed(output) == [9, 12]


@pytest.mark.slow
def test_damage_is_passed_over_by_all_and_one_process_goes_on(data, machines, bucket):
    """2 -> 1 -> 2 processes through the store; of the newest checkpoint a part is not what was written."""
    output = f"{bucket}/own"
    no_dropout = (
        *NO_DROPOUT,
        "--checkpoint.every_steps",
        "4",
        "--zero.stage",
        "1",
        "--checkpoint.accept_changes",
        "true",
        "--schedule.name",
        "constant",
        "--ema.decay",
        "0.9",
    )
    finish_all(start_on(machines(2), data, output, *no_dropout, "--train.max_steps", "8"))
    (key,) = [key for key in keys(output) if "step-00000008" in key and "pp_rank_1" in key]
    part = to_place(f"{output}/{key}")
    part.write(bytes(part.stat().st_size))
    (machine,) = machines(1)
    printed = train_on(machine, data, output, *no_dropout, "--train.max_steps", "12")
    assert "step 8 is damaged (process 0: zero_pp_rank_1" in printed and "has another SHA-256" in printed
    assert "step 4 was saved by another number of processes" in printed and "resumed from step 4 of 12" in printed
    printed = finish_all(start_on(machines(2), data, output, *no_dropout, "--train.max_steps", "16"))
    assert "resumed from step 12 of 16" in printed
    folder = machine.folder / "undisturbed"
    train(data, folder, *no_dropout, "--train.max_steps", "16", processes=2)
    local = fetch_run(to_place(output), warn=print)
    assert_same_weights(weights(local), weights(folder), 1e-5)
    assert_same_weights(*(read_weights(run, None, print, ema=True)[1] for run in (local, folder)), 1e-5)
