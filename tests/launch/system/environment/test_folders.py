"""Folders of the user outside of a run."""

import os
from pathlib import Path

import pytest

from cloze.launch.system.environment import folders
from cloze.pipeline.errors import UserError


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """As one of a number alone in a container; a folder named ~ below the working folder would be no cache."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/of/user")
    assert folders.cache_folder() == Path("/of/user/.cache/cloze")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UserError, match="HOME: found none in the environment, .*set HOME or XDG_CACHE_HOME"):
        folders.cache_folder()
