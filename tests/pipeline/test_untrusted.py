"""YAML and JSON are read within bounds."""

import os
import subprocess
import sys

import pytest

from cloze.launch import cli
from cloze.launch.commands import parse
from cloze.launch.run import runs
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.status import read_status
from cloze.pipeline.errors import UserError
from cloze.pipeline.untrusted import load_json, load_yaml, read_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "\n".join(
                ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0]"]
                + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
            ),
            "whose aliases expand to",
        ),
        ("deepspeed: &a\n  b: *a\n", "values that are nested too deep"),
        ("deepspeed: " + "[" * 5000 + "]" * 5000, "values that are nested too deep"),
        ("deepspeed: " + "[" * 65 + "]" * 65, "values that are nested too deep"),
    ],
)
def test_yaml_that_expands_without_end_is_refused_at_once(tmp_path, text, expected):
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        parse("pretrain", ["--config", str(tmp_path / "bomb.yaml"), "--data", "d", "--output", "o"])
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        runs.fields_of(tmp_path)


def test_aliases_of_a_usual_size_are_read(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "schedule: {warmup_steps: 7}\ndeepspeed:\n  wall_clock_breakdown: &no false\n  dump_state: *no\n"
    )
    config = parse("pretrain", ["--config", str(tmp_path / "c.yaml"), "--data", "d", "--output", "o"])
    assert config.schedule.warmup_steps == 7
    assert config.deepspeed == {"wall_clock_breakdown": False, "dump_state": False}


@pytest.mark.parametrize("words", [["pretrain", "--data"], ["prepare", "--mixture"]])
@pytest.mark.parametrize("given", ["in a file", "itself"])
def test_deep_values_of_options_do_not_end_the_process(tmp_path, words, given):
    """libyaml overflowed the stack, which no exception handler sees: so in a process of its own."""
    depth = 50_000 if given == "in a file" else 30_000  # a word of a command line has 128 KiB at most
    text = "[" * depth + "]" * depth
    (tmp_path / "deep.yaml").write_text(text)
    value = str(tmp_path / "deep.yaml") if given == "in a file" else text
    command = [sys.executable, "-m", "cloze", *words, value, "--output", str(tmp_path / "o")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and len(ended.stderr) < 2000


def test_yaml_nested_as_configurations_are_is_read_as_by_the_library():
    deep = "[" * 63 + "1" + "]" * 63
    value: object = 1
    for _ in range(63):
        value = [value]
    assert load_yaml("a: " + deep) == {"a": value}
    assert load_yaml("\n".join("- [1, {a: 2}]" for _ in range(1000))) == [[1, {"a": 2}]] * 1000


def test_deep_json_is_a_value_error():
    for text in ("[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000):
        with pytest.raises(ValueError):
            load_json(text)
    assert load_json(b'{"a": [1]}') == {"a": [1]}


def test_only_regular_files_are_read(tmp_path, capsys):
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(UserError, match="no regular file"):
        read_json(tmp_path / "status.json")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing.json")
    assert read_status(tmp_path) == {}
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="metrics.jsonl: found no regular file"):
        read_metrics(tmp_path)
    assert cli.main(["runs", str(tmp_path)]) in (0, 2)
    assert cli.main(["pretrain", "--config", str(tmp_path / "metrics.jsonl")]) == 2
    assert "found no regular file" in capsys.readouterr().err
