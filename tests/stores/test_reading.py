"""Shards in a store: the same batches as from disk, what is fetched, what is damaged, what the cache keeps."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest

from cloze.launch.cli import main
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.shards import shard_file
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.stores import cache as cache_module
from cloze.pipeline.stores import reading
from cloze.pipeline.stores.cache import Cache
from cloze.pipeline.stores.places import to_place
from tests.pipeline import corpus
from tests.stores.server import first
from tests.stores.stored_shards import BLOCK_TOKENS, assert_same, stream, uploaded

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_the_same_batches_as_from_disk(local, stored, tmp_path):
    """Over more than two epochs; and from any position on, by another process of the run, with another cache's help."""
    cache = Cache(tmp_path / "cache", 1 << 30, "data_cache.folder")
    expected = stream(local)
    assert_same(stream(stored, cache), expected)
    assert_same(stream(stored, Cache(tmp_path / "cache", 1 << 30, "x"), consumed=32 * 40, batches=20), expected[40:])
    half = {"rank": 1, "world_size": 2, "batches": 20}
    assert_same(stream(stored, cache, **half), stream(local, **half))


def test_only_what_is_in_use_is_fetched_and_once(local, proxy, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "PAGE", 64)
    monkeypatch.setattr(shard_file, "_FOOTER_GUESS", 256)
    stored = uploaded(local, bucket)
    proxy.requests.clear()
    cache = Cache(tmp_path / "cache", 1 << 30, "data_cache.folder")
    stream(stored, cache, batches=24)  # within the first epoch
    files = sum(path.stat().st_size for path in (local / "train").iterdir())
    # Of ten mask sets one is in use, and in the next epoch another; what stands before these small blocks is much.
    assert bytes_asked_for(proxy) < 0.7 * files
    stream(stored, Cache(tmp_path / "cache", 1 << 30, "x"), batches=24)  # another process of the machine
    assert bytes_asked_for(proxy) < 0.7 * files


def bytes_asked_for(proxy) -> int:
    """Of shards. None is asked for twice, but for pages that blocks share which are fetched at once."""
    asked, distinct = 0, set()
    for request in proxy.requests:
        if request.path.endswith(".arrow"):
            low, high = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
            asked += 1 + high - low
            distinct |= {(request.path, place) for place in range(low, high + 1)}
    assert asked < 1.1 * len(distinct)
    return asked


def test_what_follows_is_fetched_before_it_is_wanted(local, stored, tmp_path):
    """Nothing is asked of the store for the second window of a stream when that is read."""
    reader = ShardReader(stored, cache=Cache(tmp_path / "cache", 1 << 30, "x"))
    blocks = np.array([3, 4])
    reader.fetch(blocks, 1)
    for future in list(reader._ahead.values()):
        future.result()
    (to_place(stored) / "train").client.delete([each.key for each in (to_place(stored) / "train").objects()])
    window = reader.window(blocks, 1)
    expected = ShardReader(local).window(blocks, 1)
    assert np.array_equal(window.samples.input_ids, expected.samples.input_ids)
    with pytest.raises(UserError, match="not found"):
        reader.window(np.array([9]), 1)


def test_a_stream_of_batches_fetches_ahead(stored, tmp_path, monkeypatch):
    """When it gives its first batch, the window that follows in each stream is on its way."""
    monkeypatch.setattr("cloze.pipeline.loading.order.WINDOW_TOKENS", 1 << 10)
    reader = ShardReader(stored, cache=Cache(tmp_path / "cache", 1 << 30, "x"))
    made = BatchStream(reader, global_batch_size=32, micro_batch_size=8, rank=0, world_size=1, streams=4, seed=1)
    next(made)
    end = time.monotonic() + 60
    while not reader._ahead and time.monotonic() < end:  # its thread may be between two windows
        time.sleep(0.01)
    assert reader._ahead
    made.close()
    assert not reader._ahead


def test_wrong_bytes_on_the_way_are_fetched_again(local, proxy, bucket, tmp_path):
    stored = uploaded(local, bucket)

    def wrong(answer):
        status, headers, content = answer
        return status, headers, bytes(byte ^ 0x10 for byte in content)

    proxy.fault = first(1, wrong, lambda request: request.path.endswith(".arrow") and request.method == "GET")
    assert_same(stream(stored, Cache(tmp_path / "cache", 1 << 30, "x"), batches=24), stream(local, batches=24))


def test_damage_in_the_store_is_an_error(local, bucket, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(local, folder)
    content = bytearray((folder / "train/shard-00001.arrow").read_bytes())
    end = int(ShardReader(local)._opened(1)._bounds[0][1])  # of the columns that all mask sets share
    content[end - 300 : end - 100] = bytes(byte ^ 0xFF for byte in content[end - 300 : end - 100])
    (folder / "train/shard-00001.arrow").write_bytes(content)
    stored = uploaded(folder, bucket)
    with pytest.raises(UserError, match=r"^s3://.*/train/shard-00001.arrow: damaged shard: block 0 "):
        stream(stored, Cache(tmp_path / "cache", 1 << 30, "x"), batches=30)
    (folder / "train/shard-00001.arrow").write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"shard-00001.arrow: damaged shard: found \d+ bytes, expected"):
        ShardReader(uploaded(folder, bucket))
    (to_place(stored) / "train/shard-00002.arrow").unlink()
    (to_place(stored) / "train/shard-00001.arrow").write(local / "train/shard-00001.arrow")
    with pytest.raises(UserError, match="shard-00002.arrow: found no such shard"):
        ShardReader(stored)


def test_shards_of_format_1(local, bucket, tmp_path, monkeypatch):
    """Which have no index: they are fetched as a whole, and so again where the head of a block is lost."""
    folder = tmp_path / "data"
    shutil.copytree(local, folder)
    content = corpus.as_format_1(folder)
    del content["sha256"]
    content.pop("tokenizer_files", None)
    (folder / "manifest.json").write_text(corpus.manifest_text(content))
    cache = Cache(tmp_path / "cache", 1 << 30, "x")
    expected = stream(folder, batches=30)
    assert_same(stream(uploaded(folder, bucket), cache, batches=30), expected)
    for copy in cache.folder.glob("?" * 40):
        damaged = copy.read_bytes()
        copy.write_bytes(damaged[:3000] + bytes(byte ^ 1 for byte in damaged[3000:3100]) + damaged[3100:])
    assert_same(stream(f"{bucket}/data", cache, batches=30), expected)
    for copy in cache.folder.glob("?" * 40):
        copy.write_bytes(bytes(3000) + copy.read_bytes()[3000:])
    forgotten, forget = [], shard_file.Shard.forget
    monkeypatch.setattr(shard_file.Shard, "forget", lambda *of: forgotten.append(of) or forget(*of))
    assert_same(stream(f"{bucket}/data", cache, batches=30), expected)
    assert len(forgotten) == len([*cache.folder.glob("?" * 40)]), "each is fetched once more, not for each block"
    for shard in (folder / "train").iterdir():
        shard.write_bytes(bytes(3000) + shard.read_bytes()[3000:])
    with pytest.raises(UserError, match="shard-00000.arrow: damaged shard: block 0 can't be read"):
        list(stream(uploaded(folder, bucket), Cache(tmp_path / "empty", 1 << 30, "x"), batches=30))


def test_inspect_shows_the_same(small_corpus, bucket, capsys, monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_TOKENS", BLOCK_TOKENS)  # as `cloze prepare` has written them
    stored = uploaded(small_corpus, bucket)
    shown = []
    for data in (stored, str(small_corpus)):
        assert main(["inspect", data, "--samples", "2"]) == 0
        shown.append(capsys.readouterr().out.partition("objective")[2])
    assert shown[0] == shown[1] != ""
    found = Manifest.load(stored)
    assert found == Manifest.load(small_corpus) and str(found.folder) == stored


def test_verify_names_what_is_damaged(small_corpus, bucket, capsys, monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_TOKENS", BLOCK_TOKENS)  # as `cloze prepare` has written them
    stored = uploaded(small_corpus, bucket)
    assert main(["verify", stored]) == 0
    assert "all as they were written" in capsys.readouterr().out
    content = bytearray((small_corpus / "train/shard-00000.arrow").read_bytes())
    content[300] ^= 1
    (to_place(stored) / "train/shard-00000.arrow").write(bytes(content))
    (to_place(stored) / "tokenizer/vocab.txt").write(b"[PAD]\n")
    (to_place(stored) / "validation/shard-00000.arrow").unlink()
    assert main(["verify", stored]) == 2
    told = capsys.readouterr()
    assert "train/shard-00000.arrow: found SHA-256" in told.out and "validation/shard-00000.arrow: missing" in told.out
    assert "vocab.txt: found SHA-256" in told.out and "found 3 of" in told.err
    assert main(["verify", f"{bucket}/nothing"]) == 2
    assert "found no manifest.json" in capsys.readouterr().err
    assert main(["verify", "s3://not-there/data"]) == 2
    assert "found no such bucket" in capsys.readouterr().err


def test_a_file_larger_than_the_cache_stays_within_it(bucket, tmp_path, monkeypatch):
    place = to_place(bucket) / "large"
    place.write(os.urandom(1 << 20) * 24)
    cache = Cache(tmp_path / "cache", 8 << 20, "x")
    monkeypatch.setattr(reading, "scratch_cache", lambda: cache)
    with reading.open_stored(place) as file:
        most = 0
        while file.read(1 << 20):
            most = max(most, os.fstat(file._copy.fileno()).st_blocks * 512)
    assert most <= 12 << 20
