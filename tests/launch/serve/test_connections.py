"""Bounds on connections."""

import resource

import pytest

from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.connections import make_room_for_files
from cloze.pipeline.errors import UserError


def test_more_connections_than_files_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    make_room_for_files(ServeConfig("model", max_connections=3896))
    with pytest.raises(UserError, match="expected at most 3896, since a process may open 4096 files"):
        make_room_for_files(ServeConfig("model", max_connections=3897))
