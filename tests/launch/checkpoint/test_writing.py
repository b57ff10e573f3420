"""What is written is what was there when saving began, whatever training does meanwhile."""

import errno
import hashlib
import json
import os
import resource
import signal
import threading
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.checkpoint import writing
from cloze.launch.checkpoint.deepspeed_files import load_pickled
from cloze.launch.checkpoint.state import CHECKSUMS
from cloze.launch.checkpoint.writing import BackgroundWriter, ContentOnHost, write_hashed
from cloze.launch.cli import main
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments, train
from tests.synthetic import make_shards


def test_a_copy_shares_nothing_with_the_original_and_keeps_what_it_shares_itself():
    flat = torch.arange(10.0)
    model = OrderedDict(weight=flat[2:6].view(2, 2), tied=flat[2:6].view(2, 2), bias=torch.nn.Parameter(flat[7:9]))
    model._metadata = {"": {"version": 2}}
    content = {"module": model, "steps": [1, (2, torch.tensor(3))], "name": "x"}
    copied = ContentOnHost(content).take()
    flat.fill_(-1)
    assert copied["module"]["weight"].tolist() == [[2, 3], [4, 5]] and copied["module"]["bias"].tolist() == [7, 8]
    copied["module"]["tied"][0, 0] = 9
    assert copied["module"]["weight"][0, 0] == 9, "one storage, as before"
    assert isinstance(copied["module"], OrderedDict) and copied["module"]._metadata == model._metadata
    assert copied["steps"][1][1] == 3 and copied["name"] == "x"


def test_weights_that_change_during_the_write_are_not_what_is_saved(tmp_path, monkeypatch):
    """The writing thread is held at the door until the weights have changed."""
    changed = threading.Event()

    def write_late(copied, path):
        assert changed.wait(60)
        return write_hashed(copied, path)

    monkeypatch.setattr(writing, "write_hashed", write_late)
    weights = {"w": torch.randn(1000), "step": torch.tensor(5.0)}
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    writer = BackgroundWriter()
    writer.submit({"weights": weights}, tmp_path / "a.pt")
    assert not writer.done()
    weights["w"].zero_()
    weights["step"] += 1
    changed.set()
    ((name, (size, digest)),) = writer.result(tmp_path).items()
    assert writer.done() and name == "a.pt"
    assert (size, digest) == ((tmp_path / "a.pt").stat().st_size, sha256_of(tmp_path / "a.pt"))
    loaded = load_pickled(tmp_path / "a.pt")["weights"]
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_what_is_written_is_hashed_once_on_its_way(tmp_path, monkeypatch):
    """Nothing is read back: a file of which every reader compares the hash."""
    hashed, sha256 = [], hashlib.sha256

    class Counting:
        def __init__(self) -> None:
            self.update, self.hexdigest = self._update, (inner := sha256()).hexdigest
            self._inner = inner

        def _update(self, data) -> None:
            hashed.append(len(data))
            self._inner.update(data)

    monkeypatch.setattr(hashlib, "sha256", Counting)
    size, digest = write_hashed(ContentOnHost({"w": torch.ones(100_000)}), tmp_path / "a.pt")
    monkeypatch.undo()
    assert sum(hashed) == size == (tmp_path / "a.pt").stat().st_size and digest == sha256_of(tmp_path / "a.pt")


def test_a_file_that_is_shorter_than_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.os, "fstat", lambda file: SimpleNamespace(st_size=1))
    with pytest.raises(UserError, match="a.pt: found 1 bytes on the disk, expected the"):
        write_hashed(ContentOnHost({"w": torch.ones(3)}), tmp_path / "a.pt")


def test_a_write_that_fails_is_reported_by_name(tmp_path):
    writer = BackgroundWriter()
    writer.submit({"w": torch.ones(3)}, tmp_path / "missing" / "a.pt")
    with pytest.raises(UserError, match="a.pt: not found"):
        writer.result(tmp_path)


@pytest.mark.parametrize("stage", ["0", pytest.param("3", marks=pytest.mark.slow)])
def test_checkpoints_in_the_background_have_the_bytes_of_those_in_line(tmp_path, stage):
    """Two processes, a checkpoint every third step, training going on meanwhile."""
    data = make_shards(tmp_path / "data")
    found = []
    for asynchronous in ("true", "false"):
        run = tmp_path / asynchronous
        train(
            data,
            run,
            "--train.max_steps",
            "12",
            "--checkpoint.every_steps",
            "3",
            "--checkpoint.keep_last",
            "9",
            "--checkpoint.asynchronous",
            asynchronous,
            "--zero.stage",
            stage,
            processes=2,
        )
        folders = sorted((run / "checkpoints").glob("step-*"))
        found.append({folder.name: (folder / CHECKSUMS).read_text() for folder in folders})
    assert list(found[0]) == [f"step-{step:08d}" for step in (3, 6, 9, 12)]
    assert found[0] == found[1]


def write_at_most(arguments: list[str]) -> int:
    """Write a checkpoint's file in a process that may write no more than so many bytes of a file."""
    folder, limit = Path(arguments[0]), int(arguments[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    writer = BackgroundWriter()
    writer.submit({"w": torch.ones(1_000_000)}, folder / "a.pt")
    try:
        writer.result(folder)
    except UserError as error:
        print(error)
        return 2
    return 0


@pytest.mark.parametrize("limit", ["100", "5000", "2000000"])
def test_a_disk_that_fills_up_in_the_middle_of_a_file(tmp_path, limit):
    """A process may write no more than `limit` bytes: torch's writer fails at another place each time."""
    printed = finish(ForkedRun([str(tmp_path), limit], main=write_at_most), status=2)
    assert "a.pt" in printed or str(tmp_path) in printed
    assert "File too large" in printed


def fails_on_rank_1(arguments: list[str]) -> int:
    """The command line, on whose second process the disk is full."""
    write = writing.write_hashed

    def fail(copied: ContentOnHost, path: Path) -> tuple[int, str]:
        if path.name == "rank-00001.pt":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(copied, path)

    writing.write_hashed = fail
    status = main(arguments)
    if os.environ["RANK"] == "1":
        time.sleep(3)  # the launcher ends the other as soon as one has ended
    return status


def test_a_process_that_cannot_write_ends_the_run_on_all(tmp_path):
    """The second process's disk is full: both end with a line, neither waits for the other, nothing is published."""
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    words = pretrain_arguments(data, run, "--train.max_steps", "50", "--checkpoint.every_steps", "5")
    output = finish(ForkedRun(words, 2, fails_on_rank_1), status=None)  # whose patience is below that of a collective
    assert "rank-00001.pt: the disk is full" in output
    assert "found a process that could not write its part of a checkpoint" in output
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert not [path for path in (run / "checkpoints").glob("step-*") if path.suffix != ".tmp"]
