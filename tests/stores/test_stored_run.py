"""Who may write a run in a store: one job at a time, into a place that is a run's; and what takes folders alone."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest

from cloze.launch.checkpoint.transfer import StoreThread
from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.finetune.command import finetune
from cloze.launch.run.commits import is_first
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.preemption import Starting
from cloze.launch.run.runs import METRICS
from cloze.launch.run.store_retries import Patience
from cloze.launch.run.stored_run import open_stored_run, scratch_of
from cloze.launch.system.console import Console
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.exit_status import SAID_SECONDS
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores import clients, leases
from cloze.pipeline.stores.places import to_place
from cloze.pipeline.stores.temporary_folders import in_users_terms


def test_one_job_at_a_time(config, tmp_path, capsys, monkeypatch):
    other = replace(config, checkpoint=replace(config.checkpoint, scratch=str(tmp_path / "other")))
    with open_stored_run(config, Environment(), Console()) as (local, run):
        first = run.attempt
        assert local.output == str(run.folder) and run.folder.is_dir() and str(run.folder).startswith(str(tmp_path))
        for late, told in ((config, "choose another --checkpoint.scratch"), (other, "choose another --output")):
            with pytest.raises(UserError, match=told), open_stored_run(late, Environment(), Console()):
                raise AssertionError("two hold it")
        assert run.lost() is None
    assert "watching for 1 s whether it lives" in capsys.readouterr().err
    lease, releases = to_place(config.output) / "lease", []
    with monkeypatch.context() as patch:
        patch.setattr(Starting, "_releases", releases)
        with open_stored_run(other, Environment(), Console()) as (_, run):
            assert first < run.attempt and lease.is_file()
            releases.pop()()  # as where a signal ends the start
            assert not lease.is_file()
    assert not lease.is_file()


def test_lines_that_were_not_sent_outlast_a_start_that_is_killed_before_it_goes_on(config, monkeypatch):
    monkeypatch.setattr(leases.Lease, "release", lambda lease: lease._ended.set())  # as if it had been killed
    line = {"step": 1, "train/loss": 2.0}
    with open_stored_run(config, Environment(), Console()) as (_, run):
        (run.folder / METRICS).write_text(json.dumps(line) + "\n")
    for moment in ("fetch_objects", "add_unsent"):
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(f"cloze.launch.run.stored_run.{moment}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with open_stored_run(config, Environment(), Console()):
                pass
    with open_stored_run(config, Environment(), Console()) as (_, run):
        assert read_metrics(run.folder) == [line]


def test_a_place_that_is_no_run_is_left_alone(config, bucket):
    place = to_place(config.output)
    (place / "thesis.txt").write(b"precious")
    with pytest.raises(UserError, match=r"own with objects that are not a run's \(thesis.txt\)"):
        with open_stored_run(config, Environment(), Console()):
            raise AssertionError("it was taken")
    for output, told in ((bucket, "a whole bucket"), ("hf://datasets/a/b", "is only read"), ("ftp://a/b", "scheme")):
        with (
            pytest.raises(UserError, match=told),
            open_stored_run(replace(config, output=output), Environment(), Console()),
        ):
            raise AssertionError("it was taken")
    assert [each.key for each in place.objects()] == ["runs/own/thesis.txt"]


def test_a_broken_list_of_checkpoints_is_one_line(config):
    path = to_place(config.output) / "checkpoints/commits.json"
    for content in (b"{", b"[]", b'{"format": 1}', json.dumps({"format": 1, "commits": {"x": {}}}).encode()):
        path.write(content)
        with pytest.raises(UserError, match="commits.json: found no list of checkpoints"):
            with open_stored_run(config, Environment(), Console()):
                raise AssertionError("it was taken")
    path.write(b'{"format": 2}')
    with (
        pytest.raises(UserError, match="found format 2, expected 1"),
        open_stored_run(config, Environment(), Console()),
    ):
        raise AssertionError("it was taken")


def test_a_bucket_that_was_made_anew_begins_a_new_run(config):
    """What this machine has of the old run: curves are dropped, checkpoints named with their folder, each time."""
    with open_stored_run(config, Environment(), Console()) as (_, run):
        (run.folder / METRICS).write_text(json.dumps({"step": 1, "train/loss": 2.0}) + "\n")
    place = to_place(config.output)

    def made_anew() -> None:
        for each in list(place.objects()):
            place.at(each.key).unlink()

    made_anew()
    with open_stored_run(config, Environment(), Console()) as (_, run):
        assert not (run.folder / METRICS).exists() and is_first(run.attempt)
        (run.scratch / "checkpoints/step-2").mkdir()
    made_anew()
    for _ in range(2):
        with pytest.raises(UserError) as error, open_stored_run(config, Environment(), Console()):
            raise AssertionError("it was taken")
        where = f"{run.scratch}/checkpoints"
        assert str(error.value).startswith(f"checkpoint.scratch: found checkpoints in {where} (step-2), of a run that")
        assert str(error.value).endswith(f"expected none at a first start; remove {where}, or choose another --output")


def test_a_start_after_the_list_of_checkpoints_was_lost_comes_after_those_before(config):
    """Their curves are older: of two starts of one number the last by name would be taken for the newer one."""
    place = to_place(config.output)
    (place / "log/0007-ffffffff/metrics.jsonl.000000").write(b"")
    (place / "config.yaml").write(b"")
    with open_stored_run(config, Environment(), Console()) as (_, run):
        assert run.attempt.startswith("0008-")


@pytest.mark.parametrize("complete", [True, False])
def test_what_a_run_has_lost_in_the_store_is_sent_again(config, capsys, monkeypatch, complete):
    """Of one that stops the results may not have been sent."""
    names = ("config.yaml", "tokenizer/vocab.txt", "model/config.json", "predictions/validation.jsonl")
    results = names[2:]
    line = json.dumps({"step": 1, "train/loss": 2.0}) + "\n"
    earlier = "log/0001-ffffffff/metrics.jsonl.000000"
    (to_place(config.output) / earlier).write(line.encode())
    with open_stored_run(config, Environment(), Console()) as (_, run):
        for name in names:
            (run.folder / name).parent.mkdir(exist_ok=True)
            (run.folder / name).write_text(name)
            run.send(run.folder / name)
        (run.folder / METRICS).write_text(2 * line)
        run._shipper.begin(0, 0, [])
        run.ship()
        run.check_there(complete)
        assert "removed" not in capsys.readouterr().err
        for name in names:
            (run.place / name).write(b"x") if name == names[0] else (run.place / name).unlink()
            run.check_there(complete)
            if again := complete or name not in results:
                assert (run.place / name).read_bytes() == name.encode()
            told = f"{name.rpartition('/')[2]} was removed while the run used the place"
            assert (told in capsys.readouterr().err) == again
        (run.place / earlier).unlink()
        run.check_there(complete)
        assert "1 pieces of the curve were removed or changed" in capsys.readouterr().err
        (run.place / f"log/{run.attempt}/metrics.jsonl.000000").write(b"")
        run.check_there(complete)
        assert "2 pieces of the curve were removed or changed" in capsys.readouterr().err
        (run.place / names[0]).unlink()
        monkeypatch.setattr(run, "send", lambda path: None)
        with pytest.raises(UserError, match="found config.yaml gone as often as it is sent"):
            run.check_there(complete)


def test_a_file_that_scratch_has_lost_is_named_there_at_once(config):
    """Not by the name of the place in the store, which messages show for the folder, and without waiting for it."""
    with open_stored_run(config, Environment(), Console()) as (_, run):
        wait = Patience(1000, lambda line: None, threading.Event())
        (run.folder / METRICS).write_text("{}\n")
        run._shipper.begin(0, 0, [])
        (run.folder / METRICS).unlink()
        for name, send in (
            ("model/config.json", lambda: run.send(run.folder / "model/config.json")),
            (METRICS, run.ship),
        ):
            with pytest.raises(UserError) as error:
                wait(send)
            told = f"checkpoint.scratch: can't read the run's {name} in {run.folder.parent} (No such file"
            assert in_users_terms(str(error.value)).startswith(told)


def test_an_error_is_said_though_the_store_is_silent(config, proxy, request):
    """Other processes wait so long with theirs, and torchrun ends this one when they have left."""
    ended = threading.Event()
    request.addfinalizer(ended.set)
    with (
        pytest.raises(UserError, match="^the loss is infinite$"),
        open_stored_run(config, Environment(), Console()) as (_, run),
    ):
        (run.folder / "status.json").write_text("{}")  # is still to be sent
        proxy.fault = lambda _: ended.wait() and None
        began = time.monotonic()
        raise UserError("the loss is infinite")
    assert time.monotonic() - began < SAID_SECONDS


def test_what_the_end_of_a_process_cuts_short_says_nothing(monkeypatch):
    """As the interpreter does, which starts no thread for the parts of an upload any more."""
    told, ended, left = [], threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", told.append)

    def work(begun: threading.Event) -> None:
        begun.set()
        left.wait()
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    for expected in (1, 0):  # while it is not ended it is a bug, and told
        begun, told[:] = threading.Event(), []
        thread = StoreThread(ended)
        thread.submit(lambda begun=begun: work(begun))
        begun.wait()
        left.set()
        thread._thread.join()
        assert len(told) == expected and bool(thread.failure) == bool(expected)
        ended.set()


def test_a_folder_stays_one(tmp_path):
    config = parse("pretrain", ["--data", "x", "--output", str(tmp_path / "run"), "--train.max_steps", "4"])
    with open_stored_run(config, Environment(), Console()) as (same, run):
        assert same is config and run is None
    assert not (tmp_path / "run").exists()


def test_local_checkpoints_are_those_of_a_run_in_a_store(tmp_path):
    given = ["--data", "x", "--output", str(tmp_path / "run"), "--train.max_steps", "4", "--checkpoint.local", "2"]
    config = parse("pretrain", [*given, "--checkpoint.every_steps", "4"])
    with pytest.raises(UserError, match="^checkpoint.local: found 2 with the folder .*/run as output"):
        with open_stored_run(config, Environment(), Console()):
            raise AssertionError("it was taken")
    with pytest.raises(UserError, match="checkpoint.local: found 2, expected a divisor of checkpoint.every_steps = 5"):
        parse("pretrain", [*given, "--checkpoint.every_steps", "5"])


def test_what_takes_folders_alone_says_so(capsys):
    tuning = parse(
        "finetune",
        [
            "classification",
            "--model",
            "tiny",
            "--train_file",
            "x.csv",
            "--validation",
            "y.csv",
            "--output",
            "s3://bucket/own",
            "--seeds",
            "2",
        ],
    )
    with pytest.raises(UserError, match="output: found s3://bucket/own with several runs"):
        finetune(tuning, Environment())
    assert main(["doctor", "--output", "s3://bucket/own"]) == 2
    assert "output: found s3://bucket/own, expected a folder" in capsys.readouterr().err
    assert main(["evaluate", "s3://bucket/own", "--suite", "lines", "--data", "x", "--every_checkpoint", "true"]) == 2
    assert "every_checkpoint: found true with s3://bucket/own" in capsys.readouterr().err


def test_scratch_of_runs_and_machines_differs(bucket, monkeypatch):
    place = to_place(bucket) / "a/run"
    one = scratch_of(place, "/scratch")
    assert one.parent.name == "scratch" and one.name.startswith("run-")
    assert scratch_of(to_place(bucket) / "b/run", "/scratch") != one == scratch_of(place, "/scratch")
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "another")  # they may share the disk
        assert scratch_of(place, "/scratch") != one
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    clients.open_client.cache_clear()
    assert scratch_of(to_place(str(place)), "/scratch") != one, "of a bucket of the same name"
