"""What stays, waits and is taken up of checkpoints in a store: the object itself, in one process, on real objects."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.checkpoint.state import describe
from cloze.launch.checkpoint.stored import StoredCheckpoints
from cloze.launch.run.commits import CommitLog
from cloze.launch.system import distributed
from cloze.launch.system.environment import Environment
from cloze.pipeline.stores.places import to_place

CPU = torch.device("cpu")
FILES = ("rank-00000.pt", "mp_rank_00_model_states.pt")


@pytest.fixture
def start(bucket, tmp_path):
    """Makes the checkpoints of a further start of one run, each on a disk of its own."""
    met = distributed.have_met()  # of one process alone, by a test before
    if not met:
        distributed.initialize(Environment())
    place = to_place(bucket) / "run"

    def made(disk: str, **options) -> StoredCheckpoints:
        log = CommitLog(place / "checkpoints/commits.json")
        run = SimpleNamespace(place=place, checkpoints=place / "checkpoints", patience_seconds=5, log=log,
                              lost=lambda: None, ended=threading.Event(), attempt=log.claim(), stop_before_seconds=None,
                              ship=lambda: None, meet=lambda attempt: None)
        (tmp_path / disk).mkdir(exist_ok=True)
        return StoredCheckpoints(run, tmp_path / disk, Environment(), CPU, warn=lambda line: None,
                                 say=lambda line: None, **options)

    yield made
    if not met:
        distributed.shutdown()


def write(checkpoints: StoredCheckpoints, step: int, best: int = -1, files=FILES, world_size: int = 1) -> tuple:
    folder, found = checkpoints.path(step), {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in files:
        data = f"{step} {name}".encode()
        (folder / name).write_bytes(data)
        found[name] = len(data), hashlib.sha256(data).hexdigest()
    state = {"step": step, "best_step": best, "world_size": world_size, "zero_stage": 1}
    describe(folder, found, state)
    return found, state


def publish(checkpoints: StoredCheckpoints, step: int, best: int = -1) -> None:
    """As the manager does when all ranks have written."""
    found, state = write(checkpoints, step, best)
    checkpoints._published(step, [json.dumps(found)], state)
    checkpoints._best = {best}


def settle(checkpoints: StoredCheckpoints) -> None:
    checkpoints._drain(lambda: None)


def test_the_best_is_uploaded_where_a_newer_one_waits_too_and_the_one_before_stays_until_then(start):
    checkpoints = start("one", keep_last=2)
    for step in (50, 60, 70):
        publish(checkpoints, step, best=50)
        settle(checkpoints)
    free = threading.Event()
    checkpoints._thread.submit(free.wait)  # the store is slow
    publish(checkpoints, 80, best=80)
    publish(checkpoints, 90, best=80)
    checkpoints.retire(80)  # of a best that is nowhere yet
    free.set()
    settle(checkpoints)
    assert {50, 80, 90} <= set(checkpoints.steps())
    checkpoints.retire(80)
    settle(checkpoints)
    assert checkpoints.steps() == [80, 90]


def test_a_damaged_checkpoint_does_not_push_out_the_last_good_one(start):
    first = start("one", keep_last=1)
    for step in (20, 30):
        publish(first, step)
        settle(first)
    folder = first._place / "step-00000030" / first._run.log.commits[30].folder
    (folder / "rank-00000.pt.00000").write(b"x" * len((folder / "rank-00000.pt.00000").read_bytes()))
    second = start("two", keep_last=1)
    assert second.agree_on_latest() == 20
    second.retire(-1)
    settle(second)
    third = start("three", keep_last=1)
    assert third.agree_on_latest() == 20 and third.steps() == [20, 30]


def test_a_start_that_wakes_removes_nothing_of_a_later_one(start):
    """It has looked at what counts, and lists the objects when a later start has committed one."""
    old = start("one")
    publish(old, 40)
    settle(old)
    (old._place / "step-00000041" / "0000-abcdef-1" / "rank-00000.pt.00000").write(b"left")
    later = start("two")
    publish(later, 50)
    settle(later)
    old._clean()
    last = start("three")
    assert last.agree_on_latest() == 50
    assert not any("0000-abcdef" in each.key for each in last._place.objects())


def test_a_part_of_a_run_on_several_machines_is_no_whole_checkpoint(start):
    checkpoints = start("one")
    checkpoints.environment = Environment(0, 0, 2)
    checkpoints._machine = [0, 1]
    write(checkpoints, 60, files=("rank-00001.pt", "mp_rank_00_model_states.pt"), world_size=2)
    assert checkpoints._agree_on_scratch() is None
    write(checkpoints, 60, files=("rank-00000.pt", "rank-00001.pt"), world_size=2)
    assert checkpoints._agree_on_scratch() == 60
