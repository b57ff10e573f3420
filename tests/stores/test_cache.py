"""The local cache of objects: its size, damage in it, processes that share it, disks that are full or without locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.shards import shard_file
from cloze.pipeline.stores import shared
from cloze.pipeline.stores.cache import PAGE, Cache
from cloze.pipeline.stores.places import to_place
from tests.forked import ForkedRun
from tests.launching import finish, kill_all
from tests.stores.stored_shards import assert_same, stream

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_damage_in_the_cache_is_repaired(local, stored, tmp_path):
    """Any byte of any copy, also of footers; and pages that a power failure took though they are marked."""
    folder = tmp_path / "cache"
    expected = stream(local, batches=24)
    assert_same(stream(stored, Cache(folder, 1 << 30, "x"), batches=24), expected)
    rng = np.random.default_rng(0)
    for change in ("flip", "zero", "footer"):
        for copy in folder.glob("?" * 40):
            content = bytearray(copy.read_bytes())
            size = len(content) * PAGE // (PAGE + 1)
            if change == "flip":
                for spot in rng.integers(0, size, 200):
                    content[spot] ^= 1 << int(rng.integers(8))
            else:
                low = 0 if change == "zero" else size - 600
                content[low:size] = bytes(size - low)
            copy.write_bytes(content)
        assert_same(stream(stored, Cache(folder, 1 << 30, "x"), batches=24), expected)


def taken(folder: Path) -> int:
    """Bytes on disk; another thread may remove copies meanwhile."""
    total = 0
    for path in folder.glob("?" * 40):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def test_the_cache_keeps_its_size(local, stored, tmp_path, monkeypatch):
    """Though several use it, and copies go that others have open."""
    limit, sizes, trim = 96 << 10, [], Cache._trim

    def noted(cache: Cache) -> None:
        trim(cache)
        sizes.append(taken(cache.folder))

    monkeypatch.setattr(Cache, "_trim", noted)
    assert sum(path.stat().st_size for path in (local / "train").iterdir()) > limit
    expected = stream(local)
    failures = []

    def read(rank: int) -> None:
        try:
            cache = Cache(tmp_path / "cache", limit, "x")
            assert_same(
                stream(stored, cache, rank=rank, world_size=2, batches=40),
                stream(local, rank=rank, world_size=2, batches=40),
            )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert max(sizes) > 0  # at the end it may be empty: both write to copies that the other has removed
    assert taken(tmp_path / "cache") <= limit
    assert_same(stream(stored, Cache(tmp_path / "cache", limit, "x")), expected)


def reads(words: list[str]) -> int:
    """Read what is stored through a cache, as a process of its own does."""
    shard_file.BLOCK_TOKENS = 1 << 10
    stream(words[0], Cache(Path(words[1]), 1 << 30, "x"))
    print("complete")
    return 0


def test_processes_share_a_cache_and_may_be_killed(local, stored, tmp_path):
    """Two read the same at once, one of which is killed; a third finds what is whole."""
    both = [ForkedRun([stored, str(tmp_path / "cache")], main=reads) for _ in range(2)]
    while not list((tmp_path / "cache").glob("?" * 40)) and both[0].poll() is None:
        time.sleep(0.002)
    kill_all(both[0])
    assert finish(both[1]) == "complete\n"
    finish(both[0], status=None)
    assert_same(stream(stored, Cache(tmp_path / "cache", 1 << 30, "x")), stream(local))


def test_a_full_disk_is_one_line(stored, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = Cache(tmp_path / "cache", 5 << 30, "data_cache.folder")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        UserError,
        match=r"^data_cache.folder: no space is left in .*/cache; free some, give a smaller "
        r"limit than 5.4 GB, or choose another folder$",
    ):
        stream(stored, cache)


def test_a_cache_on_a_file_system_without_locks_is_one_line(bucket, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    (to_place(bucket) / "x").write(b"1")
    cache = Cache(tmp_path / "cache", 1 << 30, "data_cache.folder")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="data_cache.folder: .* can't be used \\(Operation not supported\\)"):
        shared.ask(to_place(bucket) / "x", cache)
