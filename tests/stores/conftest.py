"""A bucket of a real S3 server, and the environment in which its tools find it."""

from __future__ import annotations

import http.client
import itertools
from dataclasses import replace

import pytest

from cloze.launch.commands import parse
from cloze.launch.config import CheckpointConfig
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.shards import shard_file
from cloze.pipeline.stores import clients, leases
from cloze.pipeline.stores.places import to_place
from tests.pipeline import corpus
from tests.stores.server import Proxy, s3_server
from tests.stores.stored_shards import uploaded
from tests.synthetic import make_shards

_numbers = itertools.count()
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "a-very-secret-key",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


@pytest.fixture(scope="session")
def server_port():
    pytest.importorskip("moto.server")
    with s3_server() as port:
        yield port


@pytest.fixture
def store_environment(server_port, monkeypatch):
    """The server's as that of this process and of those that it starts."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server_port}")
    clients.open_client.cache_clear()
    yield
    clients.open_client.cache_clear()


@pytest.fixture
def bucket(server_port, store_environment):
    """The URL of a new bucket."""
    name = f"bucket-{next(_numbers)}"
    connection = http.client.HTTPConnection("127.0.0.1", server_port, timeout=60)
    signed = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
    connection.request("PUT", f"/{name}", headers={"Authorization": signed})
    assert connection.getresponse().status == 200
    connection.close()
    return f"s3://{name}"


@pytest.fixture
def proxy(server_port, bucket, monkeypatch):
    """A proxy before the server, which this process now takes for it."""
    with Proxy(server_port).running() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
        clients.open_client.cache_clear()
        yield made


@pytest.fixture
def impatient(monkeypatch):
    """Few repetitions, a moment apart, so that limits are reached soon."""
    monkeypatch.setattr(clients, "RETRIES", 2)
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(clients, "_LONGEST_WAIT", 0.02)
    clients.open_client.cache_clear()


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory):
    """A folder that `cloze prepare` wrote."""
    folder = tmp_path_factory.mktemp("corpus")
    source = corpus.write_jsonl(folder / "in" / "part.jsonl.gz", corpus.documents(60, seed=1))
    prepare(corpus.config(folder, [source]))
    return folder / "data"


@pytest.fixture
def config(bucket, tmp_path, monkeypatch):
    """A run in the bucket, whose lease lasts a second."""
    monkeypatch.setattr(leases, "SECONDS", 1.0)
    parsed = parse("pretrain", ["--data", "x", "--output", f"{bucket}/runs/own", "--train.max_steps", "4"])
    return replace(parsed, checkpoint=CheckpointConfig(scratch=str(tmp_path / "one"), store_patience_seconds=1))


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Shards of several blocks each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "BLOCK_TOKENS", 1 << 10)
        return make_shards(tmp_path_factory.mktemp("data"), train=800, mask_sets=10)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks as of the shards of `local`."""
    monkeypatch.setattr(shard_file, "BLOCK_TOKENS", 1 << 10)


@pytest.fixture
def stored(local, bucket):
    """The URL of those shards in a store."""
    return uploaded(local, bucket)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus in several forms, and what is made of it on disk."""
    folder = tmp_path_factory.mktemp("prepare")
    corpus.write_jsonl(folder / "in/a.jsonl.gz", corpus.documents(120, seed=1))
    corpus.write_jsonl(folder / "in/deep/b.jsonl", corpus.documents(60, seed=2))
    corpus.write_jsonl(folder / "in/.hidden.jsonl", ["not this"])
    prepare(corpus.config(folder, [folder / "in"]))
    return folder


@pytest.fixture
def inputs(folder, bucket):
    for path in (folder / "in").rglob("*.*"):
        (to_place(bucket) / "in" / str(path.relative_to(folder / "in"))).write(path)
    for path in (folder / "tokenizer").iterdir():
        (to_place(bucket) / "tokenizer" / path.name).write(path)
    return bucket
