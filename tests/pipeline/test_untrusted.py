"""YAML and JSON are read within bounds."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import yaml

from cloze.launch import cli
from cloze.launch.commands import parse
from cloze.launch.run import runs
from cloze.launch.run.metrics_file import metrics_of, read_metrics
from cloze.launch.run.status_file import read_status
from cloze.launch.system.exit_status import Ending
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of
from cloze.pipeline.stores.places import StorePath
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import check_readable, dump_yaml, is_number, load_json, load_yaml, read_json
from tests.pipeline import corpus


def test_yaml_is_written_with_quotes_by_our_dumper_alone():
    """A program that imports Cloze writes its own YAML as before."""
    texts = {"rate": "1e-3", "width": 0.5, "name": "é"}
    assert dump_yaml(texts) == "name: \"\\xE9\"\nrate: '1e-3'\nwidth: 0.5\n"
    assert dump_yaml(texts, allow_unicode=True, sort_keys=False) == "rate: '1e-3'\nwidth: 0.5\nname: é\n"
    assert yaml.safe_dump({"rate": "1e-3"}) == "rate: 1e-3\n"


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
        ("deepspeed: [" + "1," * 100_000 + "1]", "more than 100,000 values"),
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\ntrain: {max_steps: 1}\nseed: 2\n", "at line 3, column 1 ('seed' stands there twice)"),
        ('train: {max_steps: 1, "max_steps": 2}', "at line 1, column 23 ('max_steps' stands there twice)"),
        ('model: "a\\0"', r"at line 1, column 8 ('a\x00' holds the character 0)"),
        ("seed: 010", "('010' has the base 8 or 60 in YAML"),
        ("train:\n  max_steps: 2:08", "at line 2, column 14 ('2:08' has the base 8 or 60 in YAML"),
        *(
            (f"seed: {value}", "a value is not what its form or tag says")
            for value in ("2024-13-45", "!!int a", "!!timestamp 9", "!!bool 2", "2001-01-01 00:00:00+99:99")
        ),
        *(
            (f"train:\n  learning_rate: {number}", "has more than 256 digits")  # no float holds them
            for number in ("1" * 400, "9" * 5000, f"-0x{'f' * 400}", "1_" * 200 + "1")
        ),
        ("__path__: a", "found the name __path__"),
    ],
)
def test_yaml_that_would_be_read_otherwise_than_it_looks_is_refused(tmp_path, text, expected):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(expected)):
        parse("pretrain", ["--config", str(tmp_path / "c.yaml"), "--data", "d", "--output", "o"])
    if "__" not in text:  # what a run has written is not checked for names
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match="found what is no YAML"):
            runs.fields_of(tmp_path)


def test_merged_sections_and_other_numbers_are_read_as_by_the_library():
    text = "<<: {a: 1}\n<<: {b: 2}\nc: [0, -0, 09, 0x10, 0.05, '010', \"2:08\", 1_000, 2024-01-01]\n"
    found = load_yaml(text)
    assert found == yaml.safe_load(text) and found["a"] == 1 and found["c"][5:7] == ["010", "2:08"]


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


def test_deep_json_and_endless_numbers_are_errors_of_json():
    for text in ("[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "9" * 5000):
        with pytest.raises(json.JSONDecodeError):
            load_json(text)
    assert load_json(b'{"a": [1]}') == {"a": [1]}
    for deep, opens in ((63, True), (64, True), (65, False), (500, False), (900, False)):
        for before, behind in (("[", "]"), ('{"a":', "}")):
            with nullcontext() if opens else pytest.raises(json.JSONDecodeError, match="nested too deep"):
                load_json(before * deep + "1" + behind * deep)


@pytest.mark.parametrize("name", [runs.DATA, runs.DEVICE, runs.RESULTS])
def test_deep_fields_of_a_runs_files_are_a_line(tmp_path, name):
    (tmp_path / name).write_text('{"a": ' * 600 + "1" + "}" * 600)
    with pytest.raises(UserError, match=f"{name}: found what is no JSON"):
        runs.read_fields(tmp_path / name)


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


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("results.json", lambda path: runs.read_fields(path)),
        ("shard.arrow", lambda path: sha256_of(path)),
        ("metrics.jsonl", lambda path: read_metrics(path.parent)),
        ("metrics.jsonl", lambda path: cli.main(["status", str(path.parent)])),
        ("given.yaml", lambda path: cli.main(["plan", "--config", str(path)])),
        ("tokenizer_config.json", lambda path: Tokenizer.from_folder(path.parent)),
    ],
)
def test_a_read_that_fails_names_its_file(tmp_path, capsys, name, read):
    """As on a disk that fails; the first address of a process's memory is never mapped, and reads as one."""
    folder = tmp_path / "run"
    corpus.tokenizer().save(folder)
    (folder / "config.yaml").write_text("output: run\ntrain: {max_steps: 1}\n")
    (folder / "status.json").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/self/mem")
    with Ending() as ending:
        ending.status = read(folder / name)
    assert ending.status == 2
    assert (
        capsys.readouterr().err
        == f"error: {folder / name}: Input/output error; fix this, then run the same command again\n"
    )


def test_true_is_no_number():
    """Python takes it for 1."""
    numbers = (0, 1, -1.5, 1e308, True, False, float("nan"), float("inf"), 10**400, "1", None)
    assert [each for each in numbers if is_number(each)] == [0, 1, -1.5, 1e308] and not is_number(True)
    assert metrics_of(b'{"step": 1, "train/loss": 1}') == {"step": 1, "train/loss": 1}
    for line in (b'{"step": true, "train/loss": 1}', b'{"step": 1, "train/loss": true}'):
        assert metrics_of(line) is None


def test_of_an_object_in_a_store_nothing_is_asked():
    """It is bounded where it is read."""
    place = StorePath("s3", "none", "object")
    check_readable(place)
    assert "client" not in vars(place), "it is opened for the first request"


@pytest.mark.parametrize("text", ['{"a": "\\ud83d"}', '{"\\uDC00 b": 1}', '["\\ude00\\ud83d"]'])
def test_half_of_a_character_is_an_error_before_it_is_written(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="half of a character"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a.json") == {"a": "\U0001f600"}
