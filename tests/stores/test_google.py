"""The same in Google's store, as obstore speaks to it: a proxy translates for the S3 server of the other tests."""

from __future__ import annotations

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.stores import clients
from cloze.pipeline.stores.places import to_place
from tests.stores import checks
from tests.stores.server import GoogleProxy


@pytest.fixture
def google(server_port, bucket, monkeypatch):
    """The URL of a new bucket."""
    with GoogleProxy(server_port).running() as made:
        monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{made.port}")
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", made.token)
        clients.open_client.cache_clear()
        yield bucket.replace("s3://", "gs://")


def test_prepared_in_googles_store(google, tmp_path, capsys):
    checks.prepared_as_on_disk(google, "gs://no-such-bucket", tmp_path, capsys)


def test_a_lease_in_googles_store(google, monkeypatch):
    checks.a_lease_is_kept(google, monkeypatch)


def test_a_refused_token_is_one_line_without_it(google, monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "another-secret-token")
    clients.open_client.cache_clear()
    with pytest.raises(UserError, match=r"^gs://.*/x: the store refused the request .401 Unauthorized") as caught:
        (to_place(google) / "x").read_bytes()
    assert "secret" not in str(caught.value)
