"""Pipes and corpora where the library of the command line reads a file because a value names it."""

import os

import pytest
import yaml

from cloze.launch import cli
from cloze.pipeline.untrusted import dump_yaml

CASES = [
    ("pretrain", ["--data", "{}"], None),
    ("pretrain", ["--data={}"], None),
    ("sweep", ["--data", "{}"], None),
    ("prepare", ["--mixture", "{}"], None),
    ("prepare", ["--mixture+={}"], None),
    ("prepare", ["--mixture", "[{}]"], None),
    ("prepare", ["--mixture", "- {}"], None),
    ("prepare", ["--mixture", "# c\n- input: [a]\n  source: {}"], None),
    ("prepare", ["--mixture+={{input: [a], source: {}}}"], None),
    ("prepare", ["--mixture.source", "{}"], None),
    ("prepare", ["--mixture", "[{{input: [a], source: {}}}]"], None),
    ("prepare", ["--mixture", "named.yaml"], "- input: [a]\n  source: {}\n"),
    ("prepare", ["--config", "named.yaml"], "mixture: {}\n"),
    ("prepare", ["--config", "named.yaml"], "mixture: [{}]\n"),
    ("prepare", ["--config", "named.yaml"], "source: {}\n"),
    ("pretrain", ["--config", "named.yaml"], "data: {}\n"),
    ("pretrain", ["--config", "named.yaml"], "model: {}\n"),
    ("pretrain", ["--config", "named.yaml"], "train: {}\n"),
    ("finetune", ["--config", "named.yaml"], "evaluation: {}\n"),
]


@pytest.mark.parametrize(("command", "words", "named"), CASES)
def test_what_a_value_names_is_read_if_it_is_a_file_of_bounded_size(
    tmp_path, capsys, monkeypatch, command, words, named
):
    """Of a pipe it waited without an end; a corpus in the place of a folder was read into memory."""
    monkeypatch.chdir(tmp_path)
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"- a\n")
    os.truncate(large, 1 << 38)  # holes take no disk
    for path, found in ((pipe, "no regular file"), (large, "274,877,906,944 bytes, expected at most")):
        if named:
            (tmp_path / "named.yaml").write_text(named.format(path))
        given = [word.format(path) for word in words]
        assert cli.main([command, *given, "--output", str(tmp_path / "o")]) == 2
        assert f"{path}: found {found}" in (error := capsys.readouterr().err) and len(error.splitlines()) == 1, error


@pytest.mark.parametrize(
    ("command", "words"),
    [("prepare", ["--mixture", "-"]), ("prepare", ["--mixture+=-"]), ("prepare", ["--config", "{mixture: ['-']}"])],
)
def test_standard_input_is_no_file_of_fields(tmp_path, capsys, command, words):
    assert cli.main([command, *words, "--output", str(tmp_path / "o")]) == 2
    assert "found '-', expected a file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e-3", "1E5", "0e0", "2e5", "1.5e3", "1.e3", ".5e3", "010", "yes", "12:30"])
def test_a_text_that_looks_like_a_number_stays_one(tmp_path, capsys, text):
    """From --print_config, or a run's own configuration, into --config."""
    for words in (["--input", text, "--output", text], ["--config", str(tmp_path / "c.yaml")]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["prepare", *words, "--print_config"])
        (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert (
        yaml.safe_load((tmp_path / "c.yaml").read_text())["output"] == text and yaml.safe_load(dump_yaml(text)) == text
    )


def test_files_that_name_one_another_end(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("[b.yaml]")
    (tmp_path / "b.yaml").write_text("[a.yaml]")
    assert cli.main(["prepare", "--mixture", "a.yaml", "--output", "o"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("value", ["5", "null", "[other.yaml]", "other.yaml", "{seed: 77}"])
def test_a_file_of_fields_names_no_other_one(tmp_path, capsys, value):
    """A list was left out without a word; a number was a traceback."""
    path = tmp_path / "c.yaml"
    path.write_text(f"config: {value}\nseed: 1\n")
    for named in (str(path), f"{{config: {value}}}"):
        assert cli.main(["prepare", "--config", named, "--output", str(tmp_path / "o")]) == 2
        assert "found a config in" in (error := capsys.readouterr().err) and len(error.splitlines()) == 1, error


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("pretrain", ["--config", "{{model: {}}}"]),
        ("pretrain", ["--config", "c.yaml"]),
        ("pretrain", ["--train", "{}"]),
        ("pretrain", ["--data", "[{}]"]),
        ("pretrain", ["--model.class_path", "runs_code.A"]),
        ("prepare", ["--source", "{}"]),
        ("prepare", ["--source", "runs_code.A"]),
        ("prepare", ["--mixture", "[{}]"]),
        ("prepare", ["--mixture", "[runs_code.A]"]),
        ("sweep", ["--grid", "{{model: [{}]}}"]),
    ],
)
def test_a_file_of_fields_runs_no_code(tmp_path, capsys, monkeypatch, command, words):
    """The library of the command line would import the module of a class that a value names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "runs_code.py").write_text("import pathlib\npathlib.Path('ran').touch()\nclass A: pass\n")
    (tmp_path / "c.yaml").write_text("optimizer: {class_path: runs_code.A}\n")
    given = [word.format("{class_path: runs_code.A}") for word in words]
    assert cli.main([command, *given, "--output", "o"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "ran").exists()
