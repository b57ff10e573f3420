"""The sbatch files on a real Slurm of two hosts: signals, preemption, requeue, and the end of an undisturbed run."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from cloze.pipeline.jobs.prepare import prepare
from tests.launching import PATIENCE_SECONDS, TINY, assert_same_weights, curve, step_of, train, weights
from tests.pipeline import corpus

pytestmark = pytest.mark.slow
SINGLE, MULTI, PREPARE, SWEEP = (
    f"launch/clusters/slurm-{name}.sbatch" for name in ("single-node", "multi-node", "prepare", "sweep")
)
STEPS = 600  # more than are done while Slurm makes up its mind
RUN = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", "50")
# What the files ask for, reduced to what this machine has.
SMALL = ("--cpus-per-task=1", "--mem=0")


@pytest.fixture(scope="module")
def undisturbed(shards, tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(shards, run, *RUN, processes=2)
    return run


def submit_single(cluster, run: Path, shards, *options: str, job: tuple[str, ...] = ()) -> str:
    """Args: options of the run, and of the job."""
    return cluster.submit(
        run.with_suffix(".log"),
        *SMALL,
        "--gpus-per-node=2",
        *job,
        SINGLE,
        str(run),
        *TINY,
        *RUN,
        "--data",
        str(shards),
        *options,
    )


def submit_multi(cluster, run: Path, shards) -> str:
    return cluster.submit(
        run.with_suffix(".log"),
        *SMALL,
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=1",
        MULTI,
        str(run),
        *TINY,
        *RUN,
        "--data",
        str(shards),
    )


def until_step(cluster, job: str, run: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while step_of(run) < step:
        states, log = cluster.states(job), run.with_suffix(".log")
        text = log.read_text()[-4000:] if log.exists() else "no log"
        assert states <= {"PENDING", "CONFIGURING", "RUNNING"} and time.monotonic() < deadline, f"{states}\n{text}"
        time.sleep(0.01)


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def test_single_node_goes_on_by_itself_after_the_signal_before_the_end(slurm_cluster, shards, undisturbed, tmp_path):
    run = tmp_path / "run"
    job = submit_single(slurm_cluster, run, shards)
    until_step(slurm_cluster, job, run, 30)
    # What `--signal=B:USR1@300` sends, and to whom.
    slurm_cluster.call("scancel", "--batch", "--signal=USR1", job)
    slurm_cluster.start_requeued(job)
    assert status(run)["state"] == "requeue" and 30 <= status(run)["step"] < STEPS
    slurm_cluster.wait_for(job, "COMPLETED", log=run.with_suffix(".log"))
    assert status(run) == {"state": "complete", "step": STEPS}
    assert "resumed from step" in run.with_suffix(".log").read_text(), "both parts write into one log"
    assert curve(run) == curve(undisturbed)
    assert_same_weights(weights(run), weights(undisturbed))


def test_a_job_stops_by_itself_before_its_time_is_up(slurm_cluster, shards, tmp_path):
    """No signal is sent that anybody heeds: the file tells the run when the job ends."""
    run = tmp_path / "run"
    job = submit_single(
        slurm_cluster,
        run,
        shards,
        "--train.max_steps",
        "1000000",
        "--train.stop_before_seconds",
        "590",
        job=("--time=10", "--signal=B:URG@1"),
    )  # ten seconds after its start
    until_step(slurm_cluster, job, run, 1)
    slurm_cluster.wait_for(job, "PENDING", log=run.with_suffix(".log"))
    assert status(run)["state"] == "requeue" and status(run)["step"] >= 1
    assert "stopped with a checkpoint" in run.with_suffix(".log").read_text()
    slurm_cluster.call("scancel", job)
    slurm_cluster.wait_for(job, "CANCELLED")


def test_a_job_that_slurm_preempts_stops_with_a_checkpoint_and_goes_on(slurm_cluster, shards, undisturbed, tmp_path):
    """The run on two hosts, a process each, makes way for a job of higher priority."""
    run, script = tmp_path / "run", tmp_path / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 1\n")
    job = submit_multi(slurm_cluster, run, shards)
    until_step(slurm_cluster, job, run, 30)
    urgent = slurm_cluster.submit(tmp_path / "urgent.log", "--partition=high", "--nodes=2", "--exclusive", str(script))
    slurm_cluster.wait_for(urgent, "COMPLETED")
    assert status(run)["state"] == "requeue" and 30 <= status(run)["step"] < STEPS
    slurm_cluster.start_requeued(job)
    slurm_cluster.wait_for(job, "COMPLETED", log=run.with_suffix(".log"))
    assert status(run) == {"state": "complete", "step": STEPS}
    assert curve(run) == curve(undisturbed)
    assert_same_weights(weights(run), weights(undisturbed))


def test_multi_node_is_requeued_after_the_signal_before_the_end(slurm_cluster, shards, tmp_path):
    """What follows is what follows a preemption, of the test above."""
    run = tmp_path / "run"
    job = submit_multi(slurm_cluster, run, shards)
    until_step(slurm_cluster, job, run, 30)
    slurm_cluster.call("scancel", "--signal=USR1", job)  # what `--signal=USR1@300` sends: to every task of srun
    slurm_cluster.wait_for(job, "PENDING", log=run.with_suffix(".log"))
    assert status(run)["state"] == "requeue" and 30 <= status(run)["step"] < STEPS
    slurm_cluster.call("scancel", job)
    slurm_cluster.wait_for(job, "CANCELLED")


def processes_of(job: str) -> dict[str, int]:
    """The processes of a job's step that are ours, by their rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            variables = dict(each.partition(b"=")[::2] for each in path.read_bytes().split(b"\0"))
            command = path.with_name("cmdline").read_bytes()
            if variables.get(b"SLURM_JOB_ID") == job.encode() and b"-m\0cloze\0pretrain" in command:
                found[variables.get(b"SLURM_PROCID", b"").decode()] = int(path.parent.name)
    return found


def test_a_killed_rank_ends_the_job_and_the_next_one_goes_on(slurm_cluster, shards, undisturbed, tmp_path):
    """Rank 0, which writes the run's files, as the kernel kills what takes too much memory: the other is not left
    waiting, and the next job ends with the undisturbed bits.
    """
    run = tmp_path / "run"
    job = submit_multi(slurm_cluster, run, shards)
    until_step(slurm_cluster, job, run, 60)
    os.kill(processes_of(job)["0"], signal.SIGKILL)
    slurm_cluster.wait_for(job, "FAILED", log=run.with_suffix(".log"))
    assert not processes_of(job)
    assert 50 <= step_of(run) < STEPS and status(run)["state"] != "complete"
    again = submit_multi(slurm_cluster, run, shards)
    slurm_cluster.wait_for(again, "COMPLETED", log=run.with_suffix(".log"))
    assert "resumed from step" in run.with_suffix(".log").read_text()
    assert status(run) == {"state": "complete", "step": STEPS}
    assert curve(run) == curve(undisturbed)
    assert_same_weights(weights(run), weights(undisturbed))


@pytest.mark.parametrize("submitted", [submit_single, submit_multi])
def test_a_cancelled_job_saves_and_stays_cancelled(slurm_cluster, shards, tmp_path, submitted):
    run = tmp_path / "run"
    job = submitted(slurm_cluster, run, shards)
    until_step(slurm_cluster, job, run, 30)
    slurm_cluster.call("scancel", job)
    slurm_cluster.wait_for(job, "CANCELLED")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while status(run)["state"] != "requeue":
        assert time.monotonic() < deadline, run.with_suffix(".log").read_text()[-4000:]
        time.sleep(0.1)
    assert weights(run, status(run)["step"])
    time.sleep(3)
    assert slurm_cluster.states(job) == {"CANCELLED"}


def test_a_start_that_fails_is_not_repeated(slurm_cluster, shards, tmp_path):
    """Also where an earlier part of the run has left a status that asks for it."""
    run = tmp_path / "run"
    train(shards, run, *RUN, "--train.max_steps", "2", processes=2)
    (run / "status.json").write_text(json.dumps({"state": "requeue", "step": 2}))
    job = submit_single(slurm_cluster, run, shards, "--train.learning_rate", "7")
    slurm_cluster.wait_for(job, "FAILED")
    log = run.with_suffix(".log").read_text()
    assert "error: output: found" in log and "the run did not start" in log


def test_a_sweep_as_an_array_goes_on_by_itself_and_ends_in_a_table(slurm_cluster, shards, tmp_path):
    """Two settings, an element each; one is signalled before its end. A job that depends on both shows them."""
    pytest.importorskip("matplotlib")
    folder, log = tmp_path / "sweep", tmp_path / "sweep.log"
    names = [f"learning_rate={rate}" for rate in ("1e-3", "3e-3")]
    words = (
        SWEEP,
        str(folder),
        *TINY,
        "--train.max_steps",
        "150",
        "--data",
        str(shards),
        "--schedule.warmup_steps",
        "5",
        "--grid",
        "learning_rate=1e-3,3e-3",
    )
    array = slurm_cluster.submit(log, *SMALL, "--array=0-1", *words)
    table = slurm_cluster.submit(tmp_path / "table.log", *SMALL, f"--dependency=afterany:{array}", *words)
    until_step(slurm_cluster, f"{array}_1", folder / names[1], 5)
    slurm_cluster.call("scancel", "--batch", "--signal=USR1", f"{array}_1")
    slurm_cluster.start_requeued(f"{array}_1")
    assert status(folder / names[1])["state"] == "requeue" and slurm_cluster.states(table) == {"PENDING"}
    slurm_cluster.wait_for(array, "COMPLETED", log=log)
    slurm_cluster.wait_for(table, "COMPLETED", log=tmp_path / "table.log")
    assert "2 of 2 runs are complete already" in (tmp_path / "table.log").read_text()
    assert "resumed from step" in log.read_text() and (folder / "curves.png").is_file()
    found = json.loads((folder / "results.json").read_text())
    assert found["n"] == 2 and {name for each in found["settings"] for name in each["runs"]} == set(names)
    wrong = slurm_cluster.submit(tmp_path / "wrong.log", *SMALL, "--array=7", *words)  # there is no such run
    slurm_cluster.wait_for(wrong, "FAILED")
    assert "run: found 7, expected 0 to 1" in (tmp_path / "wrong.log").read_text()


def test_preparation_on_an_array_gives_the_same_bytes(slurm_cluster, tmp_path):
    """Three elements, a Dask worker each, on both hosts; then another submission finds all of it done."""
    pytest.importorskip("distributed")
    inputs = [
        corpus.write_jsonl(tmp_path / f"in/{number}.jsonl.gz", corpus.documents(150, seed=number))
        for number in range(6)
    ]
    config = corpus.config(tmp_path, inputs, output=str(tmp_path / "local"))
    prepare(config)
    words = (
        "--tokenizer",
        config.tokenizer,
        "--max_length",
        "64",
        "--mask_sets",
        "3",
        "--shards.target_tokens",
        "8192",
        "--split.validation",
        "0.1",
        "--split.test",
        "0.05",
        "--input",
        *config.input,
    )
    for _ in range(2):
        job = slurm_cluster.submit(
            tmp_path / "%a.log",
            "--array=0-2",
            "--cpus-per-task=1",
            "--mem-per-cpu=1",
            PREPARE,
            str(tmp_path / "data"),
            *words,
        )
        slurm_cluster.wait_for(job, "COMPLETED", log=tmp_path / "0.log")
        assert corpus.contents(tmp_path / "data") == corpus.contents(tmp_path / "local")
    assert all("Registered to" in (tmp_path / f"{element}.log").read_text() for element in range(3)), "all took part"
