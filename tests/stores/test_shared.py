"""What all processes of a run need is asked of the store by one, fetched once a machine, and is what that one found."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from cloze.launch.commands import parse
from cloze.launch.pretrain.data import open_data
from cloze.launch.pretrain.readers import read_once
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.stores import shared
from cloze.pipeline.stores.cache import Cache
from cloze.pipeline.stores.places import to_place
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments
from tests.pipeline import corpus
from tests.stores.test_reading import uploaded
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    """Another than other tests': with blocks of the usual size, as the processes of a run expect them."""
    folder = tmp_path_factory.mktemp("corpus")
    make_shards(folder / "data", max_length=32)
    return folder / "data"


@pytest.fixture
def known():
    yield
    shared.reset()


def asked(proxy) -> Counter:
    """Requests by method and name, of all but shards."""
    return Counter(
        (request.method, request.path.partition("?")[0].rpartition("/")[2])
        for request in proxy.requests
        if not request.path.endswith(".arrow")
    )


def run_arguments(stored: str, tmp_path, *more: str) -> list[str]:
    return pretrain_arguments(
        stored,
        tmp_path / "run",
        "--train.max_steps",
        "2",
        "--model.max_position_embeddings",
        "64",
        "--data_cache.folder",
        str(tmp_path / "cache"),
        "--train.global_batch_size",
        "24",
        *more,
    )


def test_three_processes_ask_as_often_as_one(small_corpus, bucket, proxy, tmp_path):
    """Once for each object, with validation, blanks that are shown, and a tokenizer that is saved with the run."""
    stored = uploaded(small_corpus, bucket)
    proxy.requests.clear()
    finish(ForkedRun(run_arguments(stored, tmp_path, "--evaluation.every_steps", "1"), 3))
    found = asked(proxy)
    names = (
        "manifest.json",
        *(path.name for path in (small_corpus / "tokenizer").iterdir()),
        "special_tokens_map.json",
        "added_tokens.json",
        "config.json",  # which may name the class
    )
    # A listing for the sizes of each split, and one that tells a missing object from a missing bucket.
    assert found.pop(("GET", to_place(stored).bucket)) <= 3
    assert found == {("GET", name): 1 for name in names}


def test_what_one_cannot_read_ends_all(bucket, tmp_path):
    """Rank 0 says why, in one line; the others don't wait for it."""
    run = ForkedRun(run_arguments("s3://not-there/data", tmp_path), 2)
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 2 and printed.count("error:") == 1 and "Traceback" not in printed, printed
    assert "error: s3://not-there: found no such bucket" in printed


def test_each_machine_fetches_a_shared_object_once(small_corpus, bucket, proxy, tmp_path, known):
    """Processes of a machine wait for the one that fetches; a damaged copy is fetched again."""
    path = to_place(uploaded(small_corpus, bucket)) / "manifest.json"
    content = (small_corpus / "manifest.json").read_bytes()
    digest = shared.ask(path, Cache(tmp_path / "first", 1 << 20, "x"))
    proxy.requests.clear()
    cache = Cache(tmp_path / "second", 1 << 20, "x")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(cache.whole(path, digest))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 4 * [content] and asked(proxy) == {("GET", "manifest.json"): 1}
    (copy,) = (tmp_path / "second").glob("?" * 40)
    copy.write_bytes(content[:-9] + b"something")
    assert cache.whole(path, digest) == content and asked(proxy) == {("GET", "manifest.json"): 2}
    copy.unlink()
    path.write(content.replace(b'"seed"', b'"sead"'))
    shared.use_digest(path, cache, digest)
    with pytest.raises(UserError, match="^s3://.*/manifest.json: found other content than a process of this run"):
        Manifest.load(path.parent)
    shared.reset()
    with pytest.raises(UserError, match="manifest.json: (damaged|found SHA)"):
        Manifest.load(path.parent)


def test_shared_objects_end_with_their_run(small_corpus, bucket, proxy, tmp_path):
    """A command of the same process afterwards asks the store; one process alone asks for each object once, too."""
    stored = uploaded(small_corpus, bucket)
    config = parse("pretrain", run_arguments(stored, tmp_path)[1:])
    proxy.requests.clear()
    with read_once(config, Environment()):
        for _ in range(3):
            open_data(config)
    assert set(asked(proxy).values()) == {1}
    to_place(f"{stored}/manifest.json").write(corpus.manifest_text({"format_version": 9}).encode())
    with pytest.raises(UserError, match="found format_version 9"):
        open_data(config)
