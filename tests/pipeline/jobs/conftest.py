"""Fixtures that the tests of this folder share."""

import shutil

import pytest

from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a corpus, the tokenizer and the data that `prepare` has made of them."""
    folder = tmp_path_factory.mktemp("prepared")
    path = corpus.write_jsonl(folder / "a.jsonl", corpus.documents(400, sentences=(1, 12)))
    prepare(corpus.config(folder, [path]))
    return folder


@pytest.fixture
def data(prepared, tmp_path):
    """Prepared data that a test may change, with a copy of what it was made of beside it."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path / "data"
