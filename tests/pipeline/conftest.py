"""A small corpus in five files, and what an undisturbed run makes of it."""

import pytest

from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus


@pytest.fixture
def a_task_for_each_file(monkeypatch):
    monkeypatch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    for number in range(5):
        corpus.write_jsonl(folder / "in" / f"part-{number}.jsonl.gz", corpus.documents(100, seed=number))
    corpus.config(folder, [folder / "in"])  # writes the tokenizer
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    prepare(corpus.config(folder, [folder / "in"], output=str(folder / "undisturbed")))
    return corpus.contents(folder / "undisturbed")
