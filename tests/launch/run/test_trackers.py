"""Trackers beside TensorBoard: a run that is killed goes on in the same curves; none of them stops or slows a run."""

import json
import sqlite3
import struct
import threading
import time

import pytest

from cloze.launch.cli import main
from cloze.launch.run import trackers
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.trackers import Tracking
from tests.launching import kill_when, pretrain_command, saved, start, step_of, train
from tests.synthetic import make_shards


class Listed:
    """A tracker that keeps what it is sent."""

    def __init__(
        self, fails_at: int | None = None, answers: threading.Event | None = None, has: dict[str, int] | None = None
    ) -> None:
        self.has = has or {}
        self.sent: list[tuple[int, dict]] = []
        self.begun: list[str | None] = []
        self.ended: bool | None = None
        self._fails_at, self._answers = fails_at, answers

    def begin(self, run_id, name, folder, facts):
        self.begun.append(run_id)
        return run_id or "first"

    def known(self):
        return self.has

    def write(self, step, scalars):
        if self._answers:
            self._answers.wait()
        if step == self._fails_at:
            raise OSError("the server is gone\nand more")
        self.sent.append((step, scalars))

    def end(self, complete):
        self.ended = complete


def test_a_resumed_run_goes_on_in_its_curves_and_sends_no_step_twice(tmp_path):
    said, tracker = [], Listed()
    tracking = Tracking("one", tracker, tmp_path, {}, said.append)
    for step in (1, 2, 3):
        tracking.write(step, {"train/loss": float(step), "bad": float("nan")})
    tracking.write(3, {"validation/loss": 3.5})
    tracking.close(complete=False)
    assert tracker.begun == [None] and tracker.ended is False
    assert tracker.sent == [(step, {"train/loss": float(step)}) for step in (1, 2, 3)] + [(3, {"validation/loss": 3.5})]
    again = Listed()
    tracking = Tracking("one", again, tmp_path, {}, said.append)
    for step in (2, 3, 4):  # from the checkpoint of step 1
        tracking.write(step, {"train/loss": float(step)})
    tracking.write(3, {"validation/loss": 3.5, "validation/accuracy": 0.5})
    tracking.close(complete=True)
    assert again.begun == ["first"] and again.ended is True and said == []
    assert again.sent == [(4, {"train/loss": 4.0}), (3, {"validation/accuracy": 0.5})]


def test_a_checkpoint_knows_the_run_where_nothing_else_does(tmp_path):
    """What the tracker itself has is not sent again, though a killed start could not record it."""
    kept = {"id": "earlier", "sent": {"train/loss": 3, "validation/loss": 2}}
    tracker, said = Listed(has={"train/loss": 5, "validation/loss": 1}), []
    (tmp_path / "empty").mkdir()
    tracking = Tracking("one", tracker, tmp_path / "empty", {}, said.append, kept)
    for step in range(2, 8):
        tracking.write(step, {"train/loss": float(step), "validation/loss": 1.0})
    tracking.close(complete=True)
    assert tracker.begun == ["earlier"] and said == []
    assert [step for step, scalars in tracker.sent if "train/loss" in scalars] == [6, 7]
    assert [step for step, scalars in tracker.sent if "validation/loss" in scalars] == [3, 4, 5, 6, 7]
    assert trackers.tracked(tmp_path / "empty")["one"]["id"] == "earlier"


def test_one_that_fails_or_is_silent_neither_stops_nor_slows(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_WAITING", 4)
    said, failing, answers = [], Listed(fails_at=0), threading.Event()
    silent = Listed(answers=answers)
    both = [
        Tracking("failing", failing, tmp_path, {}, said.append, leave_seconds=0.2),
        Tracking("silent", silent, tmp_path, {}, said.append, leave_seconds=0.2),
    ]
    began = time.monotonic()
    for step in range(100):
        for tracking in both:
            tracking.write(step, {"train/loss": 1.0})
    assert time.monotonic() - began < 5
    for tracking in both:
        tracking.close(complete=True)
    assert said[0] == "failing: the run continues without it (OSError: the server is gone)" and len(said) == 2
    assert said[1].startswith("silent: it has not answered for 0 s")
    answers.set()


def test_a_missing_library_is_said_before_the_run(tmp_path, monkeypatch, capsys):
    data = make_shards(tmp_path / "data", train=32)
    monkeypatch.setattr(trackers.Wandb, "library", "no_such_library")
    assert (
        main(
            [
                "pretrain",
                "--data",
                str(data),
                "--output",
                str(tmp_path / "run"),
                "--config",
                "tiny",
                "--monitor.trackers",
                "[wandb]",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "monitor.trackers: found wandb, whose library is not installed" in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_without_tensorboard_there_are_no_events(tmp_path):
    writer = MetricsWriter(tmp_path, trackers=())
    writer.describe(0, "a: 1\n", {"a": 1})
    writer.write(1, {"train/loss": 1.0})
    writer.precision_recall("curve", 1, [0, 1], [0.1, 0.9])
    writer.close()
    assert [line["train/loss"] for line in read_metrics(tmp_path)] == [1.0]
    assert not list(tmp_path.glob("events.*"))


def records(path) -> list[bytes]:
    """Those of a file in LevelDB's log format behind a header of 7 bytes, as wandb writes it; to where it was cut."""
    content, found, parts, place = path.read_bytes(), [], [], 7
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:  # the rest of a block is empty
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        part = content[place + 7 : place + 7 + length]
        if len(part) < length or not kind:
            break
        parts = [part] if kind in (1, 2) else [*parts, part]  # whole, first; middle, last
        if kind in (1, 4):
            found.append(b"".join(parts))
        place += 7 + length
    return found


def history(folder) -> list[tuple[int, float]]:
    """(step, training loss) of every offline file that wandb has left, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in records(path):
            items = Record.FromString(content).history.item
            values = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}
            if "train/loss" in values:
                found.append((values["_step"], values["train/loss"]))
    return found


@pytest.mark.slow  # importing both libraries takes longer than the runs
def test_a_killed_run_goes_on_in_the_same_curves_of_wandb_and_mlflow(tmp_path, monkeypatch):
    data, run = make_shards(tmp_path / "data", train=96), tmp_path / "run"
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    options = (
        "--monitor.trackers",
        "[tensorboard, wandb, mlflow]",
        "--checkpoint.every_steps",
        "50",
        "--schedule.name",
        "constant",
        "--schedule.warmup_steps",
        "5",
    )

    def both_have(step: int) -> bool:
        state = trackers.tracked(run)
        return len(state) == 2 and all(each["sent"].get("train/loss", -1) >= step for each in state.values())

    # Slow enough that the libraries, which take seconds to be imported, are at work when it is killed.
    killed = start(pretrain_command(data, run, *options, "--train.max_steps", "100000"))
    kill_when(killed, lambda: step_of(run) > 120 and both_have(step_of(run) - 20))
    ids = {name: each["id"] for name, each in trackers.tracked(run).items()}
    reached = min(each["sent"]["train/loss"] for each in trackers.tracked(run).values())
    # Values that still waited to be sent are lost up to the checkpoint; those behind it come again.
    newest = int(saved(run)[-1].name[5:])
    waited = {name: max(0, newest - each["sent"]["train/loss"]) for name, each in trackers.tracked(run).items()}
    resumed = (reached // 50) * 50 + 100
    train(data, run, *options, "--train.max_steps", str(resumed), "--checkpoint.accept_changes", "true")
    expected = {line["step"]: line["train/loss"] for line in read_metrics(run) if "train/loss" in line}
    assert {name: each["id"] for name, each in trackers.tracked(run).items()} == ids
    with sqlite3.connect(database) as found:
        rows = found.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        params = dict(found.execute("select key, value from params").fetchall())
        (status,) = found.execute("select status from runs").fetchone()
    assert status == "FINISHED" and params["train.learning_rate"] == "0.003" and len(params["manifest_hash"]) == 64
    assert "software.commit" in params and params["hardware.processes"] == "1"
    # wandb writes in a process of its own, some lines late: those of the moment of the kill are lost.
    for name, curve, lost in (("mlflow", rows, 1), ("wandb", history(run), 20)):
        steps = [step for step, _ in curve]
        assert len(set(steps)) == len(steps), f"{name}: a step twice"
        assert max(steps) == resumed and len(steps) >= len(expected) - lost - waited[name], name
        for step, value in curve:
            assert value == pytest.approx(expected[step], rel=1e-6), (name, step)


def test_the_end_does_not_wait_for_one_that_has_failed(tmp_path, monkeypatch):
    """Its full queue has no consumer, and it may have ended by an exit of its own."""

    class Leaving(Listed):
        def begin(self, run_id, name, folder, facts):
            raise SystemExit("bye")

    monkeypatch.setattr(trackers, "_WAITING", 1)
    said = []
    tracking = Tracking("one", Leaving(), tmp_path, {}, said.append, leave_seconds=60)
    tracking._thread.join()
    for step in range(3):
        tracking.write(step, {"train/loss": 1.0})
    began = time.monotonic()
    tracking.close(complete=True)
    assert time.monotonic() - began < 30 and said == ["one: the run continues without it (SystemExit: bye)"]
