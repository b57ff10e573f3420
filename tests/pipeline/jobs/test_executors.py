"""The same job on a Dask cluster of real processes, one of which is killed in the middle."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.executors import LocalExecutor, run_tasks
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.tokenize_stage import tokenize
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from tests.pipeline import corpus

pytest.importorskip("distributed")
ROOT = Path(__file__).resolve().parents[3]


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def scheduler_process():
    process = start("dask_scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1")
    yield process
    kill(process)


@pytest.fixture
def scheduler(scheduler_process):
    address = None
    for line in scheduler_process.stderr:
        if found := re.search(r"Scheduler at:\s+(tcp://\S+)", line):
            address = found.group(1)
            break
    threading.Thread(target=scheduler_process.stderr.read, daemon=True).start()  # or the pipe fills up
    return address


def worker(address: str) -> subprocess.Popen:
    process = start("dask_worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny", "--host", "127.0.0.1")
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process


def wait_for_workers(scheduler: str, count: int) -> None:
    from distributed import Client

    with Client(scheduler) as client:
        client.wait_for_workers(count, timeout=60)


def tokenize_or_hold(folder: Path, task):
    """The first worker that gets a second task holds that one until it is killed, and leaves its process id."""
    try:
        (folder / str(os.getpid())).mkdir(parents=True)
    except FileExistsError:
        with suppress(FileExistsError):
            (folder / "victim").symlink_to(str(os.getpid()))  # a link comes into being with its content
            time.sleep(600)
    return tokenize(task)


def test_the_same_bytes_though_a_worker_is_killed_after_it_completed_tasks(scheduler, tmp_path, monkeypatch):
    monkeypatch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1)  # a task for each file
    for number in range(10):
        corpus.write_jsonl(tmp_path / "in" / f"{number}.jsonl.gz", corpus.documents(150, seed=number))
    prepare(corpus.config(tmp_path, [tmp_path / "in"], output=str(tmp_path / "local")))
    monkeypatch.setattr("cloze.pipeline.jobs.prepare.tokenize", partial(tokenize_or_hold, tmp_path / "pids"))
    monkeypatch.setattr("cloze.pipeline.jobs.prepare.FILES_AT_ONCE", 4)  # ten parts: a round of exchange
    workers = [worker(scheduler) for _ in range(2)]
    try:
        wait_for_workers(scheduler, 2)
        config = corpus.config(
            tmp_path, [tmp_path / "in"], output=str(tmp_path / "dask"), executor="dask", scheduler=scheduler
        )
        failure: list[BaseException] = []

        def run() -> None:
            try:
                prepare(config)
            except BaseException as error:
                failure.append(error)

        job = threading.Thread(target=run)
        job.start()
        victim = tmp_path / "pids/victim"
        deadline = time.monotonic() + 300
        while not victim.is_symlink():
            assert job.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        assert corpus.count(tmp_path / "dask/.work", "task-*.json") >= 1
        kill(next(process for process in workers if str(process.pid) == os.readlink(victim)))
        job.join(timeout=300)
        assert not job.is_alive()
        assert not failure
        assert corpus.contents(tmp_path / "dask") == corpus.contents(tmp_path / "local")
    finally:
        for process in workers:
            kill(process)


def test_the_same_vocabulary(scheduler, tmp_path, monkeypatch):
    monkeypatch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1)  # a task for each file
    for number in range(3):
        corpus.write_jsonl(tmp_path / "in" / f"{number}.jsonl", corpus.documents(30, seed=number))
    config = PrepareConfig([str(tmp_path / "in")], str(tmp_path / "local"), vocab_size=200)
    train_vocabulary(config)
    process = worker(scheduler)
    try:
        wait_for_workers(scheduler, 1)
        train_vocabulary(replace(config, output=str(tmp_path / "dask"), executor="dask", scheduler=scheduler))
    finally:
        kill(process)
    assert corpus.contents(tmp_path / "dask") == corpus.contents(tmp_path / "local")


def die(task):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_task_that_kills_four_workers_ends_the_job_with_one_line(scheduler, tmp_path, monkeypatch):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(30))
    config = corpus.config(tmp_path, [path], executor="dask", scheduler=scheduler)
    workers = [worker(scheduler) for _ in range(4)]
    try:
        wait_for_workers(scheduler, 4)
        with monkeypatch.context() as patch:
            patch.setattr("cloze.pipeline.jobs.prepare.tokenize", die)
            with pytest.raises(UserError, match="a worker process died.*run the same command again"):
                prepare(config)
        assert [process.wait(timeout=60) for process in workers] == [-signal.SIGKILL] * 4
        workers.append(worker(scheduler))
        wait_for_workers(scheduler, 1)
        assert prepare(config).counts["documents"] == 30
    finally:
        for process in workers:
            kill(process)


def test_a_scheduler_that_does_not_answer_or_has_no_workers(scheduler, tmp_path, monkeypatch):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(5))
    settings = {"executor": "dask", "output": str(tmp_path / "out")}
    with pytest.raises(UserError, match="has no workers"):
        prepare(corpus.config(tmp_path, [path], scheduler=scheduler, **settings))
    monkeypatch.setattr("cloze.pipeline.jobs.executors._CONNECT_SECONDS", 1)
    with pytest.raises(UserError, match="no Dask scheduler answers"):
        prepare(corpus.config(tmp_path, [path], scheduler="tcp://127.0.0.1:9", **settings))


def begin_and_sleep(began: Path, task) -> None:
    began.touch()
    time.sleep(300)


def test_a_scheduler_that_dies_ends_the_job_with_one_line(scheduler_process, scheduler, tmp_path, monkeypatch):
    path, began = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(5)), tmp_path / "began"
    monkeypatch.setattr("cloze.pipeline.jobs.prepare.tokenize", partial(begin_and_sleep, began))
    process = worker(scheduler)

    def kill_in_the_middle() -> None:
        deadline = time.monotonic() + 120
        while not began.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        kill(scheduler_process)

    killer = threading.Thread(target=kill_in_the_middle)
    try:
        wait_for_workers(scheduler, 1)
        killer.start()
        with pytest.raises(UserError, match=f"scheduler: lost the one at {scheduler}.*run the same command again"):
            prepare(corpus.config(tmp_path, [path], executor="dask", scheduler=scheduler))
        killer.join()
        assert began.exists()
    finally:
        kill(process)


def test_tasks_are_made_as_they_are_needed(monkeypatch):
    """Heaviest first; never more than a few that have not ended, so that a million take no more than those."""
    monkeypatch.setattr("cloze.pipeline.jobs.executors._IN_FLIGHT", 3)
    made, ended = [], []

    def task(place: int) -> int:
        made.append(place)
        assert len(made) - len(ended) <= 3
        return -place

    def on_result(place: int, result: str) -> None:
        assert result == str(-place)
        ended.append(place)

    weights = [5, 1, 9, 5, 0, 7, 2, 2, 8, 3]
    run_tasks(LocalExecutor(1), str, task, weights, on_result)
    assert made == sorted(range(10), key=lambda place: -weights[place]) and sorted(ended) == list(range(10))
    run_tasks(LocalExecutor(1), str, task, [], on_result)
