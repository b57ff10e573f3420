"""Temporary folders of killed processes."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import describe
from cloze.pipeline.stores import temporary_folders

_COMMAND = f"""
import os, signal
from {temporary_folders.__name__} import temporary_folder
import {temporary_folders.__name__} as module
module._NEW_SECONDS = -1
temporary_folder()
"""


def test_the_next_process_removes_what_a_killed_one_has_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for kill in ("os.kill(os.getpid(), signal.SIGKILL)", ""):
        subprocess.run([sys.executable, "-c", _COMMAND + kill], check=False, timeout=60)
        assert len(list(tmp_path.iterdir())) == bool(kill)


def test_a_message_names_what_a_folder_is_a_copy_of():
    """A copy is gone when its message is read."""
    copy, nameless = temporary_folders.temporary_folder("s3://b/run"), temporary_folders.temporary_folder()
    inner = copy / "rank-00000"
    temporary_folders.show_as(inner, "s3://b/other")
    line = f"{copy / 'config.yaml'}, {inner}/x and {nameless / 'y'}: damaged"
    assert (
        temporary_folders.in_users_terms(line)
        == f"s3://b/run/config.yaml, s3://b/other/x and {nameless / 'y'}: damaged"
    )


def test_without_a_folder_for_them_or_space_in_it_a_line_names_tmpdir(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    temporary_folders._own.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(temporary_folders.tempfile, "gettempdir", none)
        with pytest.raises(UserError, match=r"^TMPDIR: found no folder .*'/tmp', '/var/tmp'.*name another one"):
            temporary_folders.temporary_folder()
    full = OSError(errno.ENOSPC, "No space left on device", str(temporary_folders.temporary_folder() / "part"))
    assert "choose another TMPDIR" in describe(full, "")
