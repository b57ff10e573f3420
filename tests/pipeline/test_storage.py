"""Folders and files that can't be written, and locks that can't be taken."""

import errno
import os

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.storage import clear, describe, holding, publish_text, readable_errors, take_lock
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


@pytest.mark.parametrize(("number", "message"), [(errno.EROFS, "read-only"), (errno.EACCES, "permission denied")])
def test_a_folder_that_may_not_be_written(folder, tmp_path, monkeypatch, number, message):
    """Simulated: the superuser, as whom tests may run, may write anywhere."""

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError, match=message):
        prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path / "data")))


def test_a_file_in_the_way_of_the_output(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file"):
        prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path / "file" / "data")))


def test_no_file_takes_the_place_of_a_pipe_or_a_folder(tmp_path):
    """Nor of a device: --json /dev/null would have removed it, for all programs."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for name, found in (
        ("pipe", "no regular file, expected one or none"),
        ("folder", "a folder, expected a file or"),
        ("link", "a link to elsewhere, expected a file or none"),
    ):
        with pytest.raises(UserError, match=f"{name}: found {found}"):
            publish_text(tmp_path / name, "x")
    assert not (tmp_path / "pipe").is_file() and (tmp_path / "link").is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_whatever_lies_in_the_place_of_a_folder_is_removed(tmp_path):
    """`shutil.rmtree` waits at a pipe for somebody who writes into it."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    os.mkfifo(tmp_path / "full/pipe")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "lost").symlink_to("nowhere")
    for name in ("full", "pipe", "link", "lost", "none"):
        for ignore_errors in (False, True):
            clear(tmp_path / name, ignore_errors=ignore_errors)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept/file").exists()


def test_a_copy_to_a_full_disk_is_not_said_of_what_is_copied():
    full = OSError(errno.ENOSPC, "No space left on device", "source", None, "target")
    assert describe(full, "folder").startswith("target: the disk is full")
    assert describe(OSError(errno.ENOENT, "none", "source", None, "target"), "folder").startswith("source: not found")


def test_what_cant_be_removed_is_named_by_its_folder(tmp_path, monkeypatch):
    """shutil.rmtree names what is in it by the last part alone."""

    def refuse(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", "f")

    (tmp_path / "left").mkdir()
    monkeypatch.setattr("cloze.pipeline.storage.shutil.rmtree", refuse)
    with pytest.raises(UserError, match=f"^{tmp_path}/left: not permitted"), readable_errors(tmp_path):
        clear(tmp_path / "left")


def test_a_pipe_in_the_place_of_a_lock_is_refused(tmp_path):
    """Opening it would wait for somebody who reads it."""
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UserError, match="lock: found no regular file"), holding(tmp_path / "lock"):
        pass


def test_a_lock_that_cant_be_closed_hides_no_error(monkeypatch, tmp_path):
    """As on a full disk, where `close` fails too."""
    locked = []
    monkeypatch.setattr("cloze.pipeline.storage.fcntl.flock", lambda file, _: locked.append(file))
    with holding(tmp_path / "lock") as held:
        os.close(locked[-1].fileno())
        assert held
    with pytest.raises(UserError, match="the disk is full"), holding(tmp_path / "lock"):
        os.close(locked[-1].fileno())
        raise UserError("the disk is full")


def test_a_lock_that_its_last_holder_has_removed_is_held_by_nobody(monkeypatch, tmp_path):
    """Whoever comes next makes a new file, and would hold that one."""
    lock = tmp_path / "lock"
    monkeypatch.setattr("cloze.pipeline.storage.fcntl.flock", lambda *_: lock.unlink())
    with holding(lock) as held:
        assert not held


def test_a_lock_that_is_only_looked_at_is_not_refused(monkeypatch, tmp_path):
    """Who looks whether a lock is free holds it for a moment, in which a run that begins was refused."""
    with open(tmp_path / "lock", "a") as looking, open(tmp_path / "lock", "a") as beginning:
        assert take_lock(looking, tmp_path / "lock")
        assert not take_lock(beginning, tmp_path / "lock")
        monkeypatch.setattr("cloze.pipeline.storage.time.sleep", lambda _: looking.close())
        assert take_lock(beginning, tmp_path / "lock")
