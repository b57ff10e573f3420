"""Files that are no text are recognized before a job begins, named and counted, and left out only when asked."""

import bz2
import gzip
import io
import json
import lzma
import re
import shlex
import wave
import zipfile

import pytest

from cloze.launch.cli import main
from cloze.pipeline import readers
from cloze.pipeline.config import MixtureSource, PrepareConfig, SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.readers.binary import _KINDS, START_BYTES, kind_by_name, kind_of


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("word/document.xml", "<w:t>text</w:t>")
    return content.getvalue()


def sound() -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\0" * 8)
    return content.getvalue()


FILES = {  # by an ending of their names; those that the standard library writes are real ones
    ".pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
    ".docx": zipped(),
    ".doc": bytes.fromhex("d0cf11e0a1b11ae1") + bytes(24),
    ".rtf": rb"{\rtf1\ansi text}",
    ".png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    ".jpg": bytes.fromhex("ffd8ffe000104a464946"),
    ".gif": b"GIF89a\1\0\1\0",
    ".webp": b"RIFF\x1a\0\0\0WEBPVP8L",
    ".tif": b"II*\0\x08\0\0\0",
    ".wav": sound(),
    ".mp3": b"ID3\x04\0\0\0",
    ".mp4": b"\0\0\0 ftypisom",
}
PACKED = [gzip.compress(b"a"), bz2.compress(b"a"), lzma.compress(b"a"), b"7z\xbc\xaf\x27\x1c"]


@pytest.mark.parametrize("suffix", FILES)
def test_kinds_are_told_by_first_bytes_and_by_name(suffix):
    assert kind_of(FILES[suffix][:START_BYTES]) == kind_by_name(suffix) is not None
    found = {kind_of(content[:START_BYTES]) for content in FILES.values()} | {kind_of(PACKED[0])}
    assert found == set(_KINDS), "each has an example"


def test_what_only_begins_like_another_kind_is_text():
    assert len({kind_of(content) for content in PACKED} - {None}) == 1
    texts = [
        "",
        "PK",
        "%PDF files",
        "ID3 tags",
        "II* and MM",
        "GIF87",
        "RIFF and WEBP",
        "{\\rtf",
        "BZh",
        "OggS",
        "f ftyp",
    ]
    assert [kind_of(text.encode()[:START_BYTES]) for text in texts] == [None] * len(texts)
    assert kind_of("Ünïcode".encode()) is kind_of("\ufefftext".encode()) is kind_by_name(".txt") is None


@pytest.fixture
def folder(tmp_path):
    for name, content in {
        "a.txt": b"one",
        "b/c.md": b"two\n\nthree",
        "b/d.jsonl.gz": gzip.compress(b'{"text": "4"}'),
    }.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    for name in ("e.pdf", "b/f.pdf", "b/g.PDF", "h.pdf", "i.docx", "j.xlsx"):
        (tmp_path / "in" / name).write_bytes(FILES[".pdf" if name.lower().endswith("pdf") else ".docx"])
    return tmp_path / "in"


@pytest.mark.parametrize("form", ["auto", "file", "text", "documents", "jsonl"])
@pytest.mark.parametrize("entry", ["", "/", "/*", "/**"])
def test_they_are_named_and_counted_and_the_glob_takes_the_rest(folder, form, entry):
    config = PrepareConfig(input=[f"{folder}{entry}"], source=SourceConfig(format=form))
    with pytest.raises(UserError) as error:
        readers.plan(config)
    said = str(error.value)
    assert "found 6 of 9 files that are no text: 4 PDF (b/f.pdf, b/g.PDF, e.pdf, …), 2 Office" in said
    assert "(i.docx, j.xlsx); expected text; convert these, " in said
    assert said.endswith("leave these out with --source.binary_files skip") and "\n" not in said
    shown = shlex.split(re.search(r"--input (.*), or leave", said)[1])
    assert f"{folder}/**/*.md" in shown
    assert [file.name for file in readers.plan(PrepareConfig(input=shown))[0]] == ["a.txt", "b/c.md", "b/d.jsonl.gz"]


def test_asked_to_they_are_left_out_with_a_note(folder):
    notes = []
    source = SourceConfig(binary_files="skip")
    config = PrepareConfig(mixture=[MixtureSource([str(folder)], source=source), MixtureSource([f"{folder}/*.txt"])])
    files, tasks = readers.plan(config, notes.append)
    assert [(file.number, file.name) for file in files] == list(enumerate(["a.txt", "b/c.md", "b/d.jsonl.gz", "a.txt"]))
    assert [document.text.strip() for task in tasks for document in readers.read(task)] == [
        *(b"one", b"two", b"three", b"4", b"one")
    ]
    (note,) = notes
    assert note.startswith("input: left out 6 of 9 files that are no text: 4 PDF (b/f.pdf, b/g.PDF, e.pdf, …)")


@pytest.mark.parametrize("handling", ["stop", "skip"])
def test_nothing_but_such_files_is_no_input(folder, handling):
    source = SourceConfig(binary_files=handling)
    with pytest.raises(UserError, match=r"found 1 of 1 files that are no text: 1 PDF .*; expected text; convert them$"):
        readers.plan(PrepareConfig(input=[f"{folder}/e.pdf"], source=source))


def test_what_names_do_not_tell_apart_gets_no_glob(folder):
    (folder / "k.txt").write_bytes(FILES[".pdf"])
    with pytest.raises(UserError, match="convert these, leave these out with"):
        readers.plan(PrepareConfig(input=[str(folder)]))


def test_they_end_a_command_before_it_begins_and_are_skipped_by_it(folder, tmp_path, capsys):
    """`cloze vocab`, which reads the same input; what was skipped changes nothing in the data's description."""
    command = ["vocab", "--input", str(folder), "--output", str(tmp_path / "vocab"), "--vocab_size", "60"]
    assert main(command) == 2
    assert "6 of 9 files that are no text" in capsys.readouterr().err and not list((tmp_path / "vocab").iterdir())
    assert main([*command, "--source.binary_files", "skip"]) == 0
    assert "note: input: left out 6 of 9 files that are no text: 4 PDF" in capsys.readouterr().err.replace("\n", " ")
    told = [PrepareConfig(input=["a"], source=SourceConfig(binary_files=each)) for each in ("stop", "skip")]
    assert json.dumps(told[0].preparation(128)) == json.dumps(told[1].preparation(128))
