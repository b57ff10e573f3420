"""Fixtures that the tests of this folder share."""

import pytest

from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus


@pytest.fixture
def data(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(400, sentences=(1, 12)))
    prepare(corpus.config(tmp_path, [path]))
    return tmp_path / "data"
