"""Inputs that are replaced while a run is interrupted, by a tool that restores their sizes and times of change."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import prepare as preparing
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.progress import Progress
from cloze.pipeline.shards.manifest import Manifest
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")
CHANGED = "a.txt: changed since an interrupted run has read it, expected the same content; restore it, or"


def interrupt(monkeypatch, config, stage: str, after: int = 0) -> None:
    """Prepare until the first tasks of a stage are complete."""
    real, count = getattr(preparing, stage), 0

    def counted(task):
        nonlocal count
        if count == after:
            raise KeyboardInterrupt
        count += 1
        return real(task)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, stage, counted)
        prepare(config)


def replace(path: Path, content: bytes) -> None:
    """Other content, of which size and time of change tell nothing."""
    old = path.stat()
    time.sleep(0.02)  # the clock of a file system may have ticks of ten milliseconds
    path.write_bytes(content)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)


def reports(output: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (output / ".work").glob("run-*/task-*.json")}


@pytest.fixture
def texts(tmp_path) -> Path:
    """Two files of paragraphs; the larger one is read first."""
    for name, count in (("a", 40), ("b", 20)):
        path = tmp_path / f"in/{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n\n".join(corpus.documents(count, seed=count)))
    return tmp_path / "in"


def test_what_is_complete_is_kept_when_bytes_are_replaced_as_the_error_advises(texts, tmp_path, monkeypatch):
    """It has none of them. Another change besides is refused as ever."""
    monkeypatch.setattr(preparing, "estimate", lambda *arguments: None)  # whose sample is all of these small files
    with open(texts / "b.txt", "ab") as file:
        file.write(b"\n\nA caf\xe9.")
    config = corpus.config(tmp_path, [texts])
    with pytest.raises(UserError, match="b.txt: .*--source.encoding_errors replace"):
        prepare(config)
    kept = reports(tmp_path / "data")
    assert [path.name for path in kept] == ["task-000000.json"]
    source = SourceConfig(encoding_errors="replace")
    with pytest.raises(UserError, match="another preparation"):
        prepare(dataclasses.replace(config, source=source, seed=5))
    interrupt(monkeypatch, dataclasses.replace(config, source=source), "build")
    times = {path.name: time for path, time in reports(tmp_path / "data").items()}
    assert len(times) == 2 and {path.name: time for path, time in kept.items()}.items() <= times.items()
    prepare(dataclasses.replace(config, source=source))
    prepare(dataclasses.replace(config, source=source, output=str(tmp_path / "alone")))
    assert corpus.contents(tmp_path / "data") == corpus.contents(tmp_path / "alone")


def swapped(content: bytes) -> bytes:
    """As many bytes of other text, from the first to the last."""
    return content.swapcase().replace(b"E", b"A")


@pytest.mark.parametrize(("stage", "after"), [("tokenize", 1), ("build", 0), ("build", 1)])
@pytest.mark.parametrize("record", ["kept", "lost"])
def test_other_content_of_a_file_that_was_read_is_refused(texts, monkeypatch, stage, after, record):
    output = texts.parent / "data"
    config = corpus.config(texts.parent, [texts], output=str(output))
    interrupt(monkeypatch, config, stage, after)
    before = (texts / "a.txt").read_bytes()
    replace(texts / "a.txt", swapped(before))
    if record == "lost":
        next((output / ".work").glob("run-*/touched.json")).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UserError, match=CHANGED):
            prepare(config)
    replace(texts / "a.txt", before)  # touched once more, but what it was
    kept = reports(output)
    interrupt(monkeypatch, config, "build")
    assert kept.items() <= reports(output).items(), "nothing is made again"
    prepare(config)
    prepare(corpus.config(texts.parent, [texts], output=str(texts.parent / "undisturbed")))
    assert corpus.contents(output) == corpus.contents(texts.parent / "undisturbed")


def test_other_content_of_a_file_that_was_not_read_is_read(texts, monkeypatch):
    output = texts.parent / "data"
    config = corpus.config(texts.parent, [texts], output=str(output))
    interrupt(monkeypatch, config, "tokenize", 1)
    replace(texts / "b.txt", swapped((texts / "b.txt").read_bytes()))
    prepare(config)
    prepare(corpus.config(texts.parent, [texts], output=str(texts.parent / "undisturbed")))
    assert corpus.contents(output) == corpus.contents(texts.parent / "undisturbed")


def test_of_a_file_of_which_a_part_was_read_nothing_old_is_left(texts, monkeypatch):
    """Its documents reach over the ends of parts; a part alone has no hash that could be trusted."""
    monkeypatch.setattr("cloze.pipeline.readers._SEGMENT_BYTES", (2000, 2000))
    output, notes, progress = texts.parent / "data", [], Progress()
    progress.note = notes.append
    config = corpus.config(texts.parent, [texts], output=str(output))
    interrupt(monkeypatch, config, "tokenize", 2)
    assert len(reports(output)) == 2
    content = (texts / "a.txt").read_bytes()
    replace(texts / "a.txt", content[:4500] + swapped(content[4500:]))
    prepare(config, progress)
    assert any("1 files were touched since" in note for note in notes)
    prepare(corpus.config(texts.parent, [texts], output=str(texts.parent / "undisturbed")))
    assert corpus.contents(output) == corpus.contents(texts.parent / "undisturbed")


def test_a_touched_file_whose_report_is_missing_after_it_was_used_is_refused(texts, monkeypatch):
    """Its task is made again when a part is damaged, while shards with what it read before are there."""
    config = corpus.config(texts.parent, [texts])
    interrupt(monkeypatch, config, "build", 1)
    for path in (texts.parent / "data/.work").glob("run-*/task-000000*"):
        path.unlink()
    replace(texts / "a.txt", swapped((texts / "a.txt").read_bytes()))
    with pytest.raises(UserError, match=CHANGED):
        prepare(config)


def test_a_link_to_another_file_is_noticed(texts, monkeypatch):
    """Both files were made together, in one tick of the clock."""
    content = (texts / "a.txt").read_bytes()
    files = [texts.parent / name for name in ("old", "new")]
    for path, data in zip(files, (content, swapped(content)), strict=True):
        path.write_bytes(data)
    for path in files:
        os.utime(path, ns=(0, 0))
    (texts / "a.txt").unlink()
    (texts / "a.txt").symlink_to(files[0])
    config = corpus.config(texts.parent, [texts])
    interrupt(monkeypatch, config, "build")
    time.sleep(0.02)
    (texts / "a.txt").unlink()
    (texts / "a.txt").symlink_to(files[1])
    with pytest.raises(UserError, match=CHANGED):
        prepare(config)


def test_a_saved_data_set_that_is_replaced_is_noticed(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "a.txt"
    texts = corpus.documents(30)
    for name, rows in ((saved, texts), (tmp_path / "other", texts[::-1])):
        datasets.Dataset.from_dict({"text": rows}).save_to_disk(name)
    config = corpus.config(tmp_path, [saved], source=SourceConfig(format="dataset"))
    interrupt(monkeypatch, config, "build")
    (old,), (new,) = saved.glob("*.arrow"), (tmp_path / "other").glob("*.arrow")
    status = old.stat()
    time.sleep(0.02)
    shutil.copyfile(new, old)
    os.utime(old, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match=CHANGED):
        prepare(config)


def test_another_tokenizer_config_with_the_same_ids_is_copied_or_refused_but_never_passed_over(texts, monkeypatch):
    output = texts.parent / "data"
    config = corpus.config(texts.parent, [texts], output=str(output))
    described = texts.parent / "tokenizer/tokenizer_config.json"
    interrupt(monkeypatch, config, "build", 1)
    before = json.loads(described.read_text())
    described.write_text(json.dumps(before | {"model_max_length": 64}))
    prepare(config)
    prepare(dataclasses.replace(config, output=str(texts.parent / "undisturbed")))
    assert corpus.contents(output) == corpus.contents(texts.parent / "undisturbed")
    kept = described.read_bytes()
    for change in (before, None):
        described.write_text(json.dumps(change)) if change else described.unlink()
        with pytest.raises(UserError, match="prepared with another tokenizer_config.json of"):
            prepare(config)
    described.write_bytes(kept)
    assert prepare(config).hash == Manifest.load(output).hash
    (output / "manifest.json").write_text(json.dumps(corpus.without_hashes(output)))
    described.write_text(json.dumps(before))
    prepare(config)
