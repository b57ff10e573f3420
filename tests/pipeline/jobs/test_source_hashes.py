"""Inputs that change or vanish while they are read."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.source_hashes import hash_piece, read_small
from cloze.pipeline.jobs.tokenize_stage import tokenize
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")


@pytest.mark.parametrize(
    ("place", "stage", "block"),
    [("prepare", tokenize, 1 << 20), ("tokenize_stage", read_small, 1 << 20), ("tokenize_stage", hash_piece, 1000)],
)
def test_an_input_that_vanishes_is_named(tmp_path, monkeypatch, place, stage, block):
    """Before its task begins or it is read, or after it has been read, before it has been hashed."""
    monkeypatch.setattr("cloze.pipeline.readers.files.BLOCK_BYTES", block)
    inputs = tmp_path / "in"
    for number in range(3):
        corpus.write_jsonl(inputs / f"{number}.jsonl", corpus.documents(20 - number, seed=number))
    config = corpus.config(tmp_path, [inputs])
    content = (inputs / "2.jsonl").read_bytes()
    status = os.stat(inputs / "2.jsonl")

    def vanish(*arguments):
        (inputs / "2.jsonl").unlink(missing_ok=True)
        return stage(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(f"cloze.pipeline.jobs.{place}.{stage.__name__}", vanish)
        with pytest.raises(UserError, match=r"2\.jsonl: not found"):
            prepare(config)
    assert not (tmp_path / "data/manifest.json").exists()
    (inputs / "2.jsonl").write_bytes(content)
    os.utime(inputs / "2.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert prepare(config).counts["documents"] == 20 + 19 + 18


def test_a_saved_data_set_that_changes_is_named(tmp_path, monkeypatch):
    """Rewritten with as many bytes: before an interrupted run goes on, and after it is complete."""
    datasets = pytest.importorskip("datasets")
    texts = corpus.documents(30)
    source = SourceConfig(format="dataset")
    config = corpus.config(tmp_path, [tmp_path / "saved"], source=source)

    def save(texts: list[str]) -> None:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")

    save(texts)
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.build", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    save(texts[::-1])
    with pytest.raises(UserError, match="interrupted run with another times of change"):
        prepare(config)
    shutil.rmtree(tmp_path / "data")
    manifest = prepare(config)
    assert len(manifest.sources[0]["sha256"]) == 64
    save(texts[::-1])  # the same again: only its times are others
    assert prepare(config).hash == manifest.hash
    save(texts)
    with pytest.raises(UserError, match="saved, which has changed since"):
        prepare(config)


def longer(path: Path) -> None:
    with open(path, "a") as file:
        file.write('{"id": "new", "text": "More."}\n')


def shorter(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def another(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize("change", [longer, shorter, another])
@pytest.mark.parametrize(("stage", "block"), [(read_small, 1 << 20), (hash_piece, 1000)])
def test_an_input_that_changes_is_named(tmp_path, monkeypatch, stage, block, change):
    """Before it is read, or after it has been read, before it has been hashed."""
    monkeypatch.setattr("cloze.pipeline.readers.files.BLOCK_BYTES", block)
    monkeypatch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1)  # a task for each file
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(20))
    larger = corpus.write_jsonl(tmp_path / "in/b.jsonl", corpus.documents(40, seed=1))  # its task is the first
    config = corpus.config(tmp_path, [path, larger])

    def changing(file, *piece):
        if file.path == str(path):
            change(path)
        return stage(file, *piece)

    with monkeypatch.context() as patch:
        patch.setattr(f"cloze.pipeline.jobs.tokenize_stage.{stage.__name__}", changing)
        with pytest.raises(UserError, match=r"a\.jsonl: changed while it was read"):
            prepare(config)
    with pytest.raises(UserError, match="interrupted run with another (sources|times of change) of a.jsonl; repeat"):
        prepare(config)


def test_a_small_file_is_opened_once_to_plan_and_once_to_read_and_hash_it(tmp_path, monkeypatch):
    for number in range(5):
        corpus.write_jsonl(tmp_path / f"in/{number}.jsonl", corpus.documents(5, seed=number))
    opened, of_system = [], os.open
    config = corpus.config(tmp_path, [tmp_path / "in"])
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.estimate", lambda *_: None)  # which reads the first megabyte
        patch.setattr("cloze.pipeline.readers.compression.open_raw", lambda path: opened.append(str(path)))
        patch.setattr(os, "open", lambda path, *how, **more: opened.append(str(path)) or of_system(path, *how, **more))
        manifest = prepare(config)
    files = [str(tmp_path / f"in/{number}.jsonl") for number in range(5)]
    assert sorted(path for path in opened if path.endswith(".jsonl")) == sorted(files * 2)
    assert [source["sha256"] for source in manifest.sources] == [
        hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files
    ]


@pytest.mark.parametrize("segment", [4 << 20, 3000])
def test_an_input_rewritten_with_the_same_size_is_not_complete_already(tmp_path, monkeypatch, segment):
    """Read by one task, or by several, so that its hash is one of pieces."""
    monkeypatch.setattr("cloze.pipeline.readers._SEGMENT_BYTES", (segment, segment))
    texts = corpus.documents(20)
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", texts)
    config = corpus.config(tmp_path, [path])
    prepare(config)
    corpus.write_jsonl(path, texts)
    prepare(config)  # younger, and the same
    corpus.write_jsonl(path, texts[::-1])
    for changed in (None, (0, 0)):  # now, and long ago, as of a copy that keeps its time
        os.utime(path, changed)
        with pytest.raises(UserError, match=r"prepared from other content of .*a\.jsonl"):
            prepare(config)
