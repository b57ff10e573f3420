"""Leases of runs in a store: their holder ends in time, and a killed holder's is taken over."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest

from cloze.launch.run.stored_run import open_stored_run
from cloze.launch.system.console import Console
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.stores import clients, leases
from cloze.pipeline.stores.leases import leased
from cloze.pipeline.stores.places import to_place
from tests.pipeline import corpus
from tests.stores.server import BUSY


def test_a_holder_ends_when_it_could_not_renew_for_its_patience(config, proxy, impatient, monkeypatch):
    """By its own clock, and before any other may take the run up; not after less, nor when it was held up itself."""
    config = replace(config, checkpoint=replace(config.checkpoint, store_patience_seconds=3))
    with open_stored_run(config, Environment(), Console()) as (_, run):
        lease, promised = run._lease, json.loads((run.place / "lease").read_bytes())["seconds"]
        assert promised == pytest.approx(3.6)
        proxy.fault = lambda request: lambda _: BUSY
        began = time.monotonic()
        while lease._problem is None:
            time.sleep(0.01)
        assert run.away() is None
        proxy.fault = lambda request: None
        while lease._problem is not None:
            time.sleep(0.01)
        time.sleep(max(0.0, began + 3.6 - time.monotonic()))
        assert run.away() is None  # it was renewed again in time
        pauses = threading.Event()
        monkeypatch.setattr(lease._ended, "wait", lambda seconds: not pauses.wait())
        time.sleep(3.6)
        assert run.away() is None and run.lost() is None  # as of a process that is stopped: it has not failed to renew
        proxy.fault = lambda request: lambda _: BUSY
        pauses.set()
        began = time.monotonic()
        while (away := run.away()) is None:
            time.sleep(0.01)
        assert 2.9 < time.monotonic() - began < promised
        assert "checkpoint.store_patience_seconds = 3: the run's lease can't be renewed (" in str(away)
        assert "503" in str(away) and run.lost() is None
        proxy.fault = lambda request: None


def test_what_a_killed_job_held_is_taken_over_at_once_on_its_machine(config, tmp_path, monkeypatch, capsys):
    """Where the lock of its process shows that it has ended; on another machine it takes the lease's time."""
    monkeypatch.setattr(leases.Lease, "release", lambda lease: lease._ended.set())  # as if it had been killed
    with open_stored_run(config, Environment(), Console()):
        pass
    with monkeypatch.context() as away, pytest.raises(UserError, match="no answer"):
        away.setattr(leases, "_take", lambda *_: (_ for _ in ()).throw(UserError("no answer")))
        with open_stored_run(config, Environment(), Console()):  # a start that takes no lease
            pass
    with open_stored_run(config, Environment(), Console()) as (_, run):
        assert run.attempt.startswith("0002-")
    assert "watching" not in capsys.readouterr().err
    elsewhere = replace(config, checkpoint=replace(config.checkpoint, scratch=str(tmp_path / "other")))
    with open_stored_run(elsewhere, Environment(), Console()):
        pass
    with open_stored_run(config, Environment(), Console()):  # whose lease it is by now, its own mark does not say
        pass
    assert capsys.readouterr().err.count("watching for 1 s whether it lives") == 2


def test_one_command_at_a_time(folder, inputs, monkeypatch):
    """A holder that lives keeps others out; one that has gone is taken over; one that was taken over stops."""
    monkeypatch.setattr(leases, "SECONDS", 1.5)
    path = to_place(inputs) / "lock"
    with leased(path, lambda _: None) as lease:
        with leased(path, lambda _: None) as other:
            assert other is None
        lease.check()
        held = json.loads(path.read_bytes())
        assert held["pid"] and held["seconds"] == 1.5
        path.write(json.dumps(held | {"token": "another"}).encode())
        time.sleep(1)
        with pytest.raises(UserError, match="the lease was lost .another has taken it over"):
            lease.check()
    assert json.loads(path.read_bytes())["token"] == "another"  # it isn't ours to remove
    began = time.monotonic()
    with leased(path, lambda _: None) as lease:
        assert time.monotonic() - began >= 1.5
        lease.check()
    assert not path.is_file()


def test_a_preparation_that_has_lost_its_lease_writes_nothing_over_what_is_there(folder, inputs, monkeypatch):
    """As one that was suspended, and another has completed the output with another tokenizer."""

    def lost(lease):
        raise UserError("the lease was lost")

    monkeypatch.setattr(leases.Lease, "check", lost)
    with pytest.raises(UserError, match="the lease was lost"):
        prepare(replace(corpus.config(folder, []), input=[f"{inputs}/in"], output=f"{inputs}/data"))
    assert to_place(f"{inputs}/data").client.names(f"{to_place(inputs).key}/data".strip("/")) == [".work"]


def test_a_request_that_a_killed_holder_has_sent_comes_late(inputs, monkeypatch):
    """One change of the lease does not show that its holder lives: it is watched anew from there."""
    monkeypatch.setattr(leases, "SECONDS", 1)
    path = to_place(inputs) / "lock"
    held = {"token": "killed", "seconds": 1, "host": "there", "pid": 7}
    path.write(json.dumps(held).encode())
    late = threading.Timer(0.4, lambda: path.write(json.dumps(held | {"renewed": "late"}).encode()))
    late.start()
    began = time.monotonic()
    with leased(path, lambda _: None) as lease:
        assert lease is not None and time.monotonic() - began >= 1.4
    late.join()


def test_a_lost_answer_and_a_store_that_does_not_answer(inputs, proxy, monkeypatch):
    monkeypatch.setattr(leases, "SECONDS", 2)
    monkeypatch.setattr(clients, "RETRIES", 1)
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    clients.open_client.cache_clear()
    path = to_place(inputs) / "lock"
    # Each write reaches the store, and its first answer is lost: its repetition meets its own write.
    proxy.fault = lambda request: (lambda _: None) if request.method == "PUT" and request.number % 2 == 0 else None
    with leased(path, lambda _: None) as lease:
        time.sleep(1.5)
        lease.check()
        proxy.fault = lambda request: lambda _: BUSY
        time.sleep(2.2)
        with pytest.raises(UserError, match="it could not be renewed in time"):
            lease.check()


@pytest.mark.parametrize("ignored", ["if-none-match", "if-match"])
def test_a_store_that_does_not_enforce_conditions_is_refused(bucket, proxy, ignored):
    proxy.ignored_headers = (ignored,)
    with pytest.raises(UserError, match="lock: found a store that does not enforce conditional writes"):
        with leased(to_place(bucket) / "lock", print):
            raise AssertionError("it was taken")
    assert not (to_place(bucket) / "lock").is_file()


def test_a_lease_that_the_store_does_not_show_is_not_taken_for_anothers(bucket, proxy, monkeypatch):
    """The answer to a renewal is lost, and then the store gives none: that shows no other holder."""
    monkeypatch.setattr(clients, "RETRIES", 1)
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    clients.open_client.cache_clear()
    path = to_place(bucket) / "lock"
    with leased(path, print) as lease:
        proxy.fault = lambda request: (lambda _: BUSY) if request.method == "GET" else None
        with pytest.raises(UserError, match="503"):
            leases._write(path, lease._token, 30.0, None)  # its condition fails, as that of a repeated write
        proxy.fault = lambda request: None
        lease.check()
