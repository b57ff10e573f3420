"""What stays, waits and is taken up of checkpoints in a store: the object itself, in one process, on real objects."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.checkpoint.fetching import INDEX, Damaged, Files, read_index, step_place
from cloze.launch.checkpoint.local_checkpoints import ATTEMPT, WHOLE
from cloze.launch.checkpoint.state import hash_of_files, write_state
from cloze.launch.checkpoint.stored_checkpoints import StoredCheckpoints, _Published
from cloze.launch.run.commits import Commit, CommitLog
from cloze.launch.system import distributed
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import StorePath, to_place

CPU = torch.device("cpu")
FILES = ("rank-00000.pt", "mp_rank_00_model_states.pt")


@pytest.fixture
def start(bucket, tmp_path):
    """Makes the checkpoints of a further start of one run, each on a disk of its own."""
    met = distributed.have_met()  # of one process alone, by a test before
    if not met:
        distributed.initialize(Environment())
    place = to_place(bucket) / "run"

    def made(disk: str, graces: dict | None = None, warn=lambda line: None, **options) -> StoredCheckpoints:
        log = CommitLog(place / "checkpoints/commits.json")
        run = SimpleNamespace(
            place=place,
            checkpoints=place / "checkpoints",
            patience_seconds=5,
            log=log,
            lost=lambda: None,
            away=lambda: None,
            ended=threading.Event(),
            attempt=log.claim(),
            graces=graces or {},
            ship=lambda: None,
            meet=lambda attempt: None,
        )
        (tmp_path / disk).mkdir(exist_ok=True)
        return StoredCheckpoints(run, tmp_path / disk, Environment(), CPU, warn=warn, say=lambda line: None, **options)

    yield made
    if not met:
        distributed.shutdown()


def write(
    checkpoints: StoredCheckpoints,
    step: int,
    best: int = -1,
    files=FILES,
    world_size: int = 1,
    others: Files | None = None,
) -> tuple:
    """others: the files of other machines."""
    folder, found = checkpoints.path(step), {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in files:
        data = f"{step} {name}".encode()
        (folder / name).write_bytes(data)
        found[name] = len(data), hashlib.sha256(data).hexdigest()
    state = {
        "step": step,
        "best_step": best,
        "world_size": world_size,
        "zero_stage": 1,
        ATTEMPT: checkpoints._run.attempt,
        WHOLE: hash_of_files(found | (others or {})),
    }
    write_state(folder, found, state)
    return found, state


def publish(checkpoints: StoredCheckpoints, step: int, best: int = -1, local: bool = False) -> None:
    """As the manager does when all ranks have written."""
    found, state = write(checkpoints, step, best)
    checkpoints._published(step, [json.dumps(found)], state, local)
    checkpoints._good.add(step)
    checkpoints._best = {best}


def settle(checkpoints: StoredCheckpoints) -> None:
    checkpoints._upload_all(lambda: None)


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


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_parts_that_are_removed_while_it_waits_for_others_are_named(start, monkeypatch, whose):
    """As by a rule of a bucket that cleans up: it waited without an end."""
    checkpoints = start("one", keep_last=2)
    other = {"rank-00001.pt": (5, hashlib.sha256(b"other").hexdigest()), "rank-00002.pt": (9, "0" * 64)}
    found, state = write(checkpoints, 20, others=other)
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        (folder,) = {each.key.rpartition("/")[0] for each in checkpoints._place.objects() if "rank" in each.key}
        place = StorePath(checkpoints._place.scheme, checkpoints._place.bucket, folder)
        if looks == 0:
            (place / "rank-00001.pt.00000").write(b"other")
        elif looks == 1:
            place.writer.delete([f"{folder}/rank-0000{int(whose != 'own')}.pt.00000"])
        looks += 1

    monkeypatch.setattr("cloze.launch.checkpoint.stored_checkpoints.time.sleep", sleep)
    published = _Published(20, found | other, found, state)
    with pytest.raises(UserError, match=f"rank-0000{int(whose != 'own')}.pt.00000 is missing, expected it as it was"):
        checkpoints._upload(published, "attempt-1")


@pytest.mark.parametrize("lost", ["index.json", "rank-00000.pt.00000", ""])
def test_a_last_checkpoint_that_is_lost_in_the_store_is_seen(start, lost):
    """Before a run says that it is complete there, and removes what this machine has of it."""
    checkpoints = start("one", keep_last=2)
    for step in (50, 60):
        publish(checkpoints, step)
        settle(checkpoints)
    checkpoints.check_last()
    for each in list((checkpoints._place / "step-00000060").objects()):
        if each.key.endswith(lost):
            checkpoints._place.at(each.key).unlink()
    with pytest.raises(
        UserError, match="step-00000060: found that .*, expected the checkpoint as it was uploaded: .*/one"
    ):
        checkpoints.check_last()


def test_a_part_that_does_not_come_ends_the_waiting(start, monkeypatch):
    checkpoints = start("one", keep_last=2)
    found, state = write(checkpoints, 20)
    monkeypatch.setattr("cloze.launch.checkpoint.stored_checkpoints._MOST_SECONDS_OF_A_PART", 0)
    with pytest.raises(UserError, match="rank-00001.pt.00000 is missing, expected another part within"):
        checkpoints._upload(_Published(20, found | {"rank-00001.pt": (5, "0" * 64)}, found, state), "attempt-1")


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


def test_at_another_stage_the_files_of_other_ranks_are_fetched_too(start):
    """Whole tensors that are divided otherwise: a rank needs states and averages that others have saved."""
    first, foreign = start("one"), "optimizer-00001.pt"
    found, state = write(first, 20, files=(*FILES, foreign))
    first._published(20, [json.dumps(found)], state, False)
    settle(first)
    for disk, stage, fetched in (("two", None, False), ("three", 1, False), ("four", 0, True)):
        later = start(disk, stage=stage)
        assert later.agree_on_latest() == 20
        assert (later.path(20) / foreign).exists() == fetched, stage


def test_a_start_that_wakes_removes_nothing_of_a_later_one(start):
    """It has looked at what counts, and lists the objects when a later start has committed one."""
    old = start("one")
    publish(old, 40)
    settle(old)
    (old._place / "step-00000041" / "0000-abcdef-1" / "rank-00000.pt.00000").write(b"left")
    later = start("two")
    publish(later, 50)
    settle(later)
    old._remove_uncommitted()
    last = start("three")
    assert last.agree_on_latest() == 50
    assert not any("0000-abcdef" in each.key for each in last._place.objects())


def test_a_part_of_a_run_on_several_machines_is_no_whole_checkpoint(start):
    checkpoints = start("one")
    checkpoints.environment = Environment(0, 0, 2)
    checkpoints._ranks_by_machine, checkpoints._local_ranks = [[0, 1]], [0, 1]
    write(
        checkpoints,
        60,
        files=("rank-00001.pt", "mp_rank_00_model_states.pt"),
        world_size=2,
        others={"rank-00000.pt": (1, "0" * 64)},
    )
    assert checkpoints._agree_on_scratch() is None
    write(checkpoints, 60, files=("rank-00000.pt", "rank-00001.pt"), world_size=2)
    assert checkpoints._agree_on_scratch() == 60


def test_scratch_has_the_last_local_one_and_the_store_what_is_for_it(start):
    checkpoints = start("one")
    for step in (10, 11, 12):
        publish(checkpoints, step, local=step != 10)
        checkpoints._begin_upload()
        checkpoints.retire(-1)
    settle(checkpoints)
    checkpoints.retire(-1)
    assert checkpoints.steps() == [10]
    assert {path.name for path in checkpoints.folder.iterdir()} == {"step-00000010", "step-00000012"}
    checkpoints.finish(None, lambda: None)  # a run that ends leaves its last one in the store
    assert checkpoints.steps() == [10, 12]


def test_of_scratch_and_store_the_newer_one_is_taken_and_none_that_the_run_has_gone_on_without(start):
    first = start("one")
    publish(first, 10)
    settle(first)
    publish(first, 14, local=True)
    again = start("one")
    assert again.agree_on_latest() == 14 and again.state(14)[ATTEMPT].startswith("0001-")
    elsewhere = start("two")  # another machine, which does not know of it
    assert elsewhere.agree_on_latest() == 10
    publish(elsewhere, 12)
    settle(elsewhere)
    back = start("one")
    assert back.agree_on_latest() == 12
    publish(back, 13, local=True)
    back.retire(-1)  # what the run has not gone on from is not the newest of anything
    assert 14 not in [int(path.name[5:]) for path in back.folder.iterdir()]
    assert start("one").agree_on_latest() == 13


def seconds_of(line: str, start_of_line: str) -> float:
    assert line.startswith(start_of_line), line
    return float(line.removeprefix(start_of_line).split()[0])


def test_a_stop_that_leaves_less_than_an_upload_takes_is_said_once(start, monkeypatch):
    """Also if the first one was quick enough: by whatever says how long a stop leaves."""
    said: list[str] = []
    graces = {"train.stop_before_seconds": 1.5, "train.grace_seconds": 1e6}  # an upload takes some 0.1
    checkpoints = start("one", graces, said.append)
    publish(checkpoints, 10)
    settle(checkpoints)
    assert said == []
    write = StorePath.write

    def late(path: StorePath, content) -> None:
        time.sleep(1.7 if path.name == "index.json" else 0.0)
        write(path, content)

    monkeypatch.setattr(StorePath, "write", late)
    for step in (20, 30):
        publish(checkpoints, step)
        settle(checkpoints)
    (line,) = said
    assert seconds_of(line, "train.stop_before_seconds = 1.5: step 20 took ") >= 1.7 and "grace" not in line
    both = start("two", {"train.stop_before_seconds": 0.1, "train.grace_seconds": 0.2}, said.append)
    publish(both, 40)
    settle(both)
    start_of_line = "train.stop_before_seconds = 0.1 and train.grace_seconds = 0.2: step 40 took "
    assert seconds_of(said[1], start_of_line) >= 1.7


def test_checkpoints_of_a_run_of_which_the_store_has_nothing(start):
    """Its objects were removed: whether scratch is to go too, only its owner knows."""
    first = start("one")
    publish(first, 10)
    settle(first)
    place = first._run.place
    place.client.delete([each.key for each in place.objects()])
    second = start("one")
    with pytest.raises(UserError, match=f"^checkpoint.scratch: found checkpoints in {re.escape(str(second.folder))}"):
        second.agree_on_latest()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world_size": ...}, "world_size is missing"),
        ({"zero_stage": []}, "zero_stage is '[]'"),
        ({"step": "6"}, "step is '6'"),
        ({"step": 5}, "it is that of another step"),
        ({"world_size": 10**30}, "world_size is '1000"),
        ({"best_step": None}, "best_step is 'None'"),
    ],
)
def test_a_state_of_an_index_is_checked_as_that_of_a_folder(bucket, change, said):
    """Its digest is right: an earlier version has written it, or somebody else."""
    place = to_place(bucket) / "run"
    state = {"step": 6, "best_step": 4, "world_size": 1, "zero_stage": 0} | change
    state = {name: value for name, value in state.items() if value is not ...}
    folder = step_place(place, 6) / "a"
    data = json.dumps({"state": state, "files": {}}).encode()
    (folder / INDEX).write(data)
    with pytest.raises(Damaged, match=f"index.json: state: {re.escape(said)}"):
        read_index(place, 6, Commit("a", hashlib.sha256(data).hexdigest(), len(data)))
