"""The list of checkpoints that count: conditional writes, lost answers, old jobs."""

from __future__ import annotations

import json

import pytest

from cloze.launch.run.commits import Commit, CommitLog, TakenOver, read_commits
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores import clients
from cloze.pipeline.stores.places import to_place
from tests.stores.server import BUSY


def test_an_old_job_cannot_commit(bucket):
    path = to_place(bucket) / "run/commits.json"
    assert read_commits(path) == {}
    old = CommitLog(path)
    first = old.claim()
    old.commit(10, Commit("a", "x", 1))
    new = CommitLog(path)
    second = new.claim()
    assert first < second
    assert sorted(new.commits) == [10]
    new.commit(20, Commit("b", "y", 2))
    for late in (lambda: old.commit(30, Commit("c", "z", 3)), lambda: old.remove({10})):
        with pytest.raises(TakenOver, match="taken over by another job"):
            late()
    assert sorted(read_commits(path)) == [10, 20]
    new.remove({10})
    assert read_commits(path) == {20: Commit("b", "y", 2)}


@pytest.mark.parametrize(
    "commits",
    [
        {"6": {"folder": "../../x"}},
        {"6": {"folder": "a\0b"}},
        {"6": {"folder": "é"}},
        {"6": {}, "06": {}},
        {"6": {"digest": 5}},
        {"6": {"num_bytes": 0.5}},
    ],
)
def test_what_no_run_writes_is_refused(bucket, commits):
    path = to_place(bucket) / "run/commits.json"
    log = CommitLog(path)
    log.claim()
    log.commit(6, Commit("a", "x", 1))
    saved = json.loads(path.read_bytes())
    of_one = saved["commits"]["6"]
    path.write(json.dumps(saved | {"commits": {step: of_one | each for step, each in commits.items()}}).encode())
    with pytest.raises(UserError, match="commits.json: found a checkpoint whose folder or hash is no text or lies"):
        read_commits(path)


def test_a_lost_answer_commits_once(bucket, proxy, monkeypatch):
    """The store has done what it was asked for, and the repetition meets its own write."""
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    clients.open_client.cache_clear()
    path = to_place(bucket) / "run/commits.json"
    log = CommitLog(path)
    log.claim()
    log.commit(10, Commit("a", "x", 1))
    lost = []

    def fault(request):
        if request.method == "PUT" and not lost:
            lost.append(request)
            return lambda answer: None
        return None

    proxy.fault = fault
    log.commit(20, Commit("b", "y", 2))
    log.commit(30, Commit("c", "z", 3))
    assert lost and sorted(read_commits(path)) == [10, 20, 30]


def test_a_write_that_came_through_after_all(bucket, proxy, impatient):
    """The client has given the write up, which was done; the next one goes on from there."""
    path = to_place(bucket) / "run/commits.json"
    log = CommitLog(path)
    log.claim()
    proxy.fault = lambda request: (lambda answer: BUSY) if request.method == "PUT" else None
    with pytest.raises(UserError, match="503"):
        log.commit(10, Commit("a", "x", 1))
    proxy.fault = lambda request: None
    log.commit(10, Commit("a", "x", 1))
    assert sorted(read_commits(path)) == [10]
