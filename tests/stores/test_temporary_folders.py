"""Temporary folders of killed processes."""

from __future__ import annotations

import subprocess
import sys

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
