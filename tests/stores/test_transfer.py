"""Files of a checkpoint, sent."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest

from cloze.launch.checkpoint import transfer
from cloze.launch.checkpoint.fetching import INDEX, read_index
from cloze.launch.checkpoint.transfer import Damaged, fetch, parts_of, upload
from cloze.launch.run.commits import Commit
from cloze.launch.run.store_retries import Patience
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import to_place


def test_files_in_parts(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PART_BYTES", 1000)
    content = bytes(range(256)) * 20
    (tmp_path / "x.pt").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    folder = to_place(bucket) / "step"
    patience = Patience(0, print, threading.Event())
    upload(tmp_path / "x.pt", len(content), digest, folder, patience)
    sizes = [each.size for each in folder.objects()]
    assert len(sizes) == 6 and sum(sizes) == len(content) and max(sizes) <= 1000 and min(sizes) > 500
    target = tmp_path / "back" / "x.pt"
    target.parent.mkdir()
    fetch(folder, len(content), digest, target)
    assert target.read_bytes() == content
    (folder / "x.pt.00003").write(b"!" * sizes[3])
    with pytest.raises(Damaged, match="another SHA-256"):
        fetch(folder, len(content), digest, target)
    (folder / "x.pt.00003").unlink()
    with pytest.raises(Damaged, match="x.pt.00003 is missing"):
        fetch(folder, len(content), digest, target)
    (tmp_path / "x.pt").write_bytes(content[::-1])
    with pytest.raises(UserError, match="other bytes on the disk"):
        upload(tmp_path / "x.pt", len(content), digest, folder, patience)
    assert parts_of(0) == [(0, 0)] and parts_of(1001) == [(0, 500), (500, 1001)]


@pytest.mark.parametrize(
    "index",
    [
        *({"state": {"step": 1}, "files": {name: [0, ""]}} for name in ("../../x", "/tmp/x", "a/../../x", "")),
        {"state": {"step": 1}, "files": {"x": [-1, ""]}},
        {"state": {"step": 1}, "files": {"x": [10**18, ""]}},  # of whose parts there would be no end
        {"state": {"step": 1}, "files": {"x": [1]}},
        {"state": [], "files": {}},
        {"files": None},
        [],
        "[" * 100_000,
    ],
)
def test_an_index_that_was_made_to_harm_is_damage(bucket, index):
    """With the right hash: its files would be written outside of the folder that they are fetched to."""
    content = index.encode() if isinstance(index, str) else json.dumps(index).encode()
    place = to_place(bucket) / "checkpoints"
    (place / "step-00000001/1-a" / INDEX).write(content)
    with pytest.raises(Damaged, match=INDEX):
        read_index(place, 1, Commit("1-a", hashlib.sha256(content).hexdigest(), 1))
