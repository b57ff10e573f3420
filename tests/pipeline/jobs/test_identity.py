"""Whose run a folder holds: a complete one of other text is told from this command's."""

import os

import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import identity
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.progress import Progress
from tests.pipeline import corpus


class Noting(Progress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def folders_alike(folder) -> None:
    """Two folders whose files have the same names, sizes and times, all long before a run."""
    texts = corpus.documents(20)
    for name, order in (("first", 1), ("other", -1)):
        path = corpus.write_jsonl(folder / name / "a.jsonl", texts[::order])
        os.utime(path, (0, 0))


@pytest.mark.parametrize("exchange", ["another folder", "renamed"])
def test_a_folder_of_the_same_names_and_sizes_is_another_input(tmp_path, exchange):
    folders_alike(tmp_path)
    prepare(corpus.config(tmp_path, [tmp_path / "first"]))
    given = tmp_path / "other"
    if exchange == "renamed":
        (tmp_path / "first").rename(tmp_path / "kept")
        given = given.rename(tmp_path / "first")
    with pytest.raises(UserError, match=r"prepared from other content of .*a\.jsonl, which has changed since"):
        prepare(corpus.config(tmp_path, [given]))


def test_the_same_text_elsewhere_is_complete(tmp_path):
    folders_alike(tmp_path)
    prepare(corpus.config(tmp_path, [tmp_path / "first"]))
    (tmp_path / "first").rename(tmp_path / "moved")
    progress = Noting()
    prepare(corpus.config(tmp_path, [tmp_path / "moved"]), progress)
    assert progress.notes == [f"{tmp_path / 'data'} is complete already"]


def test_of_much_text_it_is_said_that_it_was_not_read(tmp_path, monkeypatch):
    folders_alike(tmp_path)
    monkeypatch.setattr(identity, "_HASHED_AGAIN_BYTES", 1000)
    config = corpus.config(tmp_path, [tmp_path / "first"])
    prepare(config)
    os.utime(tmp_path / "data/manifest.json", ns=(1 << 62, 1 << 62))  # long after all
    read, progress = [], Noting()
    monkeypatch.setattr(identity, "source_hash", lambda file, _: read.append(file.name))
    prepare(config, progress)
    (note,) = progress.notes
    assert note.endswith("is complete already; its input was compared by names, sizes and times of change")
    assert not read
