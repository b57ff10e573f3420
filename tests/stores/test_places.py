"""Locations that are given as paths or URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import StorePath, is_url, to_place


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3:/bucket/x", "two slashes"),
        ("s3://AKIA:wJalr/topsecret@bucket/x", "credentials"),
        ("s3:AKIA:topsecret@b/x", "two slashes"),
        ("s3://bucket/x\n", "line break"),
        ("s3:///bucket/x", "an empty part"),  # s3://$NAME/bucket/x of a variable without a value
        ("ftp://host/x", "scheme 'ftp'"),
        ("s3://", "s3://bucket/folder"),
        ("s3://a/../b", "s3://bucket/folder"),
        ("hf://datasets/x", "hf://datasets/OWNER/NAME"),
        ("s3://key:topsecret@bucket/x", "credentials"),
        ("https://bucket/x?X-Amz-Signature=topsecret", "scheme 'https'"),
        ("gs://bucket/x?key=topsecret", "credentials"),
    ],
)
def test_bad_urls(url, told):
    with pytest.raises(UserError, match=told) as error:
        to_place(url)
    assert "topsecret" not in str(error.value)


def test_local_paths_stay_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    (tmp_path / "s3:/x").touch()
    assert to_place("s3:/x") == Path("s3:/x") and to_place("a/b") == Path("a/b") and not is_url("C:/x")
    assert to_place("S3://b/x/") == StorePath("s3", "b", "x") and str(to_place("gs://b/x") / "y") == "gs://b/x/y"
