"""Input files are found: whatever an entry names is read, or named in an error."""

import os
import socket
from pathlib import Path

import pytest

from cloze.pipeline import readers
from cloze.pipeline.config import PrepareConfig, SourceConfig
from cloze.pipeline.errors import UserError


def found(*entries, **folders) -> list[str]:
    """Names of the files of some entries."""
    config = PrepareConfig(input=[str(entry) for entry in entries], **folders)
    return [file.name for file in readers.plan(config)[0]]


@pytest.fixture
def tree(tmp_path):
    for name in ("in/a.txt", "in/b/c.txt", "in/b/d/e.txt", "away/f.txt", "away/g/h.txt", ".hidden/i.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_linked_folders_are_entered_each_once_and_names_stay_below_the_input(tree):
    (tree / "in/linked").symlink_to("../away")
    (tree / "in/b/back").symlink_to("..")
    (tree / "in/0").symlink_to("b/d")  # comes first, and yet the folder's own name is taken
    (tree / "away/too").symlink_to("../.hidden")
    expected = ["a.txt", "b/c.txt", "b/d/e.txt", "linked/f.txt", "linked/g/h.txt", "linked/too/i.txt"]
    assert found(tree / "in") == found(tree / "in/**") == expected
    (tree / "in/0").unlink()
    assert found(tree / "in/*", tree / "in/b") == found(tree / "in") == expected
    assert found(tree / "in/**/h.txt") == ["h.txt"] and found(tree / "in/linked/g") == ["h.txt"]
    assert found(tree / "in", output=str(tree / "away/too")) == expected[:-1]
    assert found(tree / "in", output=str(tree / "away")) == expected[:3]


@pytest.mark.parametrize("entry", ["in", "in/*", "in/**", "in/**/*.txt", "in/b", "in/b/gone.txt", "in/b/*.txt"])
def test_a_dangling_link_is_an_error_that_names_it(tree, entry):
    (tree / "in/b/gone.txt").symlink_to("../../nowhere")
    with pytest.raises(UserError, match="in/b/gone.txt: links to ../../nowhere, where nothing is"):
        found(tree / entry)
    assert found(tree / "in/*.txt") == ["a.txt"]


def test_links_in_a_circle_and_what_is_no_file_are_errors(tree):
    (tree / "in/b/loop").symlink_to("loop")
    with pytest.raises(UserError, match="in/b/loop: "):
        found(tree / "in")
    (tree / "in/b/loop").unlink()
    os.mkfifo(tree / "in/b/pipe")
    for entry in ("in", "in/b/pipe", "in/b/p*"):
        with pytest.raises(UserError, match="in/b/pipe: is no file"):
            found(tree / entry)


@pytest.mark.parametrize("kind", ["folder", "file", "link into a folder"])
def test_what_may_not_be_read_is_an_error_that_names_it(folder_of_nobody, as_nobody, kind):
    top = folder_of_nobody
    secret = top / "in/secret"
    secret.mkdir(parents=True)
    (top / "in/a.txt").write_text("a")
    (secret / "b.txt").write_text("b")
    if kind == "link into a folder":
        secret.rename(top / "elsewhere")
        secret.symlink_to("../elsewhere/b.txt")
        closed, named = top / "elsewhere", secret
    else:
        closed = named = secret if kind == "folder" else secret / "b.txt"
    closed.chmod(0)
    entries = ["in", "in/*", "in/**", "in/**/*.txt", "in/secret/*.txt", "in/secret/b.txt"]
    with as_nobody():
        for entry in entries if kind != "link into a folder" else entries[:3]:
            with pytest.raises(UserError, match=f"{named}.*: permission denied"):
                found(top / entry)
        assert found(top / "in/*.txt") == ["a.txt"]
    closed.chmod(0o700)


@pytest.mark.parametrize("folder", [False, True])
def test_a_name_that_is_not_utf8_is_found_before_the_job(tree, folder):
    path = os.fsencode(tree) + b"/in/b/caf\xe9"
    if folder:
        os.mkdir(path)
        path += b"/a.txt"
    Path(os.fsdecode(path)).write_text("text")
    with pytest.raises(UserError, match=r"input: found the name .*caf\\xe9.* expected one in UTF-8") as error:
        found(tree / "in")
    str(error.value).encode()  # can be printed


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".lz4"])
def test_a_compressed_file_without_bytes_is_an_error_and_a_plain_one_has_no_text(tree, suffix):
    (tree / "in/empty.txt").touch()
    assert "empty.txt" in found(tree / "in")
    (tree / f"in/b/c.txt{suffix}").touch()
    with pytest.raises(UserError, match=f"in/b/c.txt{suffix}: found no bytes, expected a .* file"):
        found(tree / "in")


@pytest.mark.parametrize("name", ["a.zip", "a.TAR", "a.tar.gz", "a.tgz", "a.jsonl.7z", "a.txt.Z", "a.lzma"])
def test_archives_are_no_text(tree, name):
    (tree / "in" / name).write_bytes(b"a")
    with pytest.raises(UserError, match=f"{name}: found .*; unpack it"):
        found(tree / "in")


def test_patterns_name_what_those_of_the_standard_library_do(tree, monkeypatch):
    import glob

    monkeypatch.chdir(tree)
    (tree / "in/.j.txt").write_text("j")
    (tree / "in/b/[k].txt").write_text("k")
    (tree / "in/l").symlink_to("b/../../away")
    patterns = [
        "in/*.txt",
        "in/b/*.txt",
        "*/*/*.txt",
        "**/*.txt",
        "in/**/d/*.txt",
        "i?/[ab].txt",
        "in/b/../*.txt",
        "in/.*.txt",
        ".*/*.txt",
        "*/.j*",
        f"{tree}/in/b/[[]k].txt",
        "in/l/*.txt",
        "./in/**/h.txt",
        "in/*/[!c].txt",
    ]
    for pattern in patterns:
        planned, _ = readers.plan(PrepareConfig(input=[pattern]))
        expected = {os.path.realpath(name) for name in glob.glob(pattern, recursive=True)}
        assert expected and {os.path.realpath(file.path) for file in planned} == expected, pattern
    assert found("in/b/[k].txt") == ["[k].txt"]  # a path that is there is no pattern
    for pattern in ("in/*.jsonl", "nowhere/*", "in/a.txt.gz", "*/nowhere/*.txt", "in/b/nowhere"):
        with pytest.raises(UserError, match="found nothing at"):
            found(pattern)
    with pytest.raises(UserError, match="in/a.txt: "):
        found("in/a.txt/*")


def test_an_unknown_users_folder_is_a_name_as_others(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert found("~/in/b/d") == ["e.txt"]
    with pytest.raises(UserError, match="~nobody-of-this-name/in"):
        found("~nobody-of-this-name/in")


def test_a_socket_is_no_file(tree, monkeypatch):
    monkeypatch.chdir(tree / "in")  # such names are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        with pytest.raises(UserError, match="in/s: is no file"):
            found(tree / "in")


def test_a_table_is_not_read_as_lines_of_text_unasked(tmp_path):
    (tmp_path / "texts.csv").write_text('title,text\nA,"said ""no"", twice"\n')
    with pytest.raises(UserError, match=r"texts.csv: found a table \(.csv\), expected text, JSON lines or Parquet"):
        found(tmp_path)
    assert found(tmp_path, source=SourceConfig(format="lines")) == ["texts.csv"]


def test_an_empty_name_is_no_folder(tmp_path, monkeypatch):
    """An unset variable of the shell would name the current one."""
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="input: found an empty name, expected a file, a folder or a glob"):
        readers.plan(PrepareConfig(input=[""]))
