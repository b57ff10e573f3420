"""`cloze predict ...` and `cloze tokenize`: what comes in, what goes out, and what is said when it cannot."""

import codecs
import gzip
import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cloze.launch import cli
from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.system.environment.launchers import child_variables
from tests.byte_level import byte_tokenizer
from tests.launch.errors import error_of
from tests.launch.predict.asking import lines
from tests.launch.tiny_models import POSITIONS, save_model
from tests.launching import ROOT


def test_a_pipe_of_commands_as_in_a_shell_does_not_import_the_compiler(folders):
    """A real process: lines in, one JSON object a line out. The compiler would be a third of the time until then."""
    program = "import sys; from cloze.launch.cli import main; main(sys.argv[1:]); print('torch._dynamo' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program, "predict", "classify", str(folders / "classifier")],
        input="cat\nthe mat\n",
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=child_variables(OMP_NUM_THREADS="1"),
    )
    *answers, imported = result.stdout.splitlines()
    assert imported == "False", result.stdout + result.stderr
    assert [json.loads(line)["text"] for line in answers] == ["cat", "the mat"]


@pytest.mark.parametrize("text", ["#cat", "null", "~", "&a", "3", "[a]", "a: b", ""])
def test_a_text_is_what_was_typed_not_yaml(text, tmp_path):
    for arguments in (["classify", "m", "a", "--pair", text], ["classify", "m", "a", f"--pair={text}"]):
        assert parse(f"predict {arguments[0]}", arguments[1:]).pair == text
    assert parse("predict answer", ["m", "a", "--context", text]).context == text
    assert parse("predict features", ["m", "a", "--word", text]).word == text
    assert parse("tokenize", ["m", text, "--pair", text]).pair == text
    (tmp_path / "fields.yaml").write_text("pair: null\n")  # as --print_config writes it
    assert parse("tokenize", ["m", "a", "--config", str(tmp_path / "fields.yaml")]).pair is None
    (tmp_path / "output.yaml").write_text("output: vectors.npy\n")  # a path is no text: null is none, as --help says
    words = ["m", "a", "--config", str(tmp_path / "output.yaml"), "--output", "null"]
    assert parse("predict embed", words).output is None


def test_texts_from_files_and_from_standard_input(folders, capsys, tmp_path, monkeypatch):
    model = folders / "classifier"
    (tmp_path / "texts.txt").write_text("good film\nthe cat\tthe mat\n", encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text('{"text": "good film"}\n{"text": "the cat", "pair": "the mat"}\n')
    plain = lines(capsys, "predict", "classify", model, "--file", tmp_path / "texts.txt")
    assert plain == lines(capsys, "predict", "classify", model, "--file", tmp_path / "texts.jsonl")
    assert "pair" not in plain[0] and plain[1]["pair"] == "the mat"
    content = (tmp_path / "texts.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert plain == lines(capsys, "predict", "classify", model, "--file", "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert plain == lines(capsys, "predict", "classify", model)
    for name in ("texts.txt", "texts.jsonl"):  # as some editors begin a file
        (tmp_path / f"marked-{name}").write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
        assert plain == lines(capsys, "predict", "classify", model, "--file", tmp_path / f"marked-{name}")
    (tmp_path / "asked.jsonl").write_text('{"question": "who sat", "context": "the cat sat"}\n')
    (line,) = lines(capsys, "predict", "answer", folders / "answerer", "--file", tmp_path / "asked.jsonl")
    assert line["context"] == "the cat sat" and line["answers"][0]["text"] in line["context"]


def test_a_picture_of_every_head(folders, capsys, tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "heads.png"
    assert main(["predict", "features", str(folders / "pretrained"), "the cat sat", "--attention", str(path)]) == 0
    assert "3 layers of 4 heads" in capsys.readouterr().out
    height, width, _ = imread(path).shape
    assert height > 300 and width > 500
    dollars = save_model(tmp_path / "dollars", ours=byte_tokenizer(["a $$ and a $x_$ ^"] * 3))
    assert main(["predict", "features", str(dollars), "a $$ and a $x_$", "--attention", str(tmp_path / "d.svg")]) == 0
    assert (tmp_path / "d.svg").exists() and "3 layers of 4 heads" in capsys.readouterr().out
    error = error_of(capsys, "predict", "features", folders / "pretrained", "a", "--attention", tmp_path / "heads.doc")
    assert "expected a picture" in error and not (tmp_path / "heads.doc").exists()
    error = error_of(capsys, "predict", "features", folders / "pretrained", "a", "i", "--attention", path)
    assert "found 2 texts, expected one" in error
    drawn = ("predict", "features", folders / "pretrained", "a", "--attention", path)
    assert "layer: found 0 beside attention" in error_of(capsys, *drawn, "--layer", "0")
    assert "format: found 'json' beside attention" in error_of(capsys, *drawn, "--format", "json")
    assert "word: found 'a' beside attention" in error_of(capsys, *drawn, "--word", "a")
    written = ("--format", "table", "--output", tmp_path / "a.jsonl")
    error = error_of(capsys, "predict", "embed", folders / "pretrained", "a", *written)
    assert "format: found table beside output" in error and not (tmp_path / "a.jsonl").exists()


def test_a_picture_of_vectors_coloured_by_a_column(folders, capsys, tmp_path, monkeypatch):
    table = tmp_path / "words.csv"
    table.write_text(
        "word,kind\n" + "".join(f"{word},{kind}\n" for kind in "ab" for word in ("cat", "sky", f"sea {kind}"))
    )
    words = ["predict", "embed", folders / "pretrained", "--file", table, "--text_columns", "word", "--picture"]
    picture, vectors = tmp_path / "words.png", tmp_path / "vectors.npy"
    assert main([str(word) for word in (*words, picture, "--colour_column", "kind", "--output", vectors)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote 6 results to {vectors}", f"drew 6 texts to {picture}"]
    assert picture.read_bytes().startswith(b"\x89PNG") and np.load(vectors).shape == (6, 32)
    error = error_of(capsys, *words, tmp_path / "a.svg", "--colour_column", "kinds")
    assert "words.csv: row 2: found 'word', 'kind', expected the column 'kinds'" in error
    assert not (tmp_path / "a.svg").exists()
    assert "expected a picture" in error_of(capsys, *words, tmp_path / "a.gif")
    embed = ("predict", "embed", folders / "pretrained", "cat", "sky")
    assert "found 2 texts, expected at least three" in error_of(capsys, *embed, "--picture", picture)
    assert "found kind without a table" in error_of(capsys, *embed, "--picture", picture, "--colour_column", "kind")
    assert "format: found json beside picture" in error_of(capsys, *embed, "--picture", picture, "--format", "json")
    assert "found kind without a picture" in error_of(capsys, *embed, "--colour_column", "kind")
    monkeypatch.setattr("cloze.launch.system.pictures.find_spec", lambda name: None)
    monkeypatch.delattr("cloze.launch.predict.predictor.load_model")  # refused before the model is loaded
    assert "picture: found no matplotlib" in error_of(capsys, *words, picture)
    features = ("predict", "features", folders / "pretrained", "cat", "--attention", picture)
    assert "attention: found no matplotlib" in error_of(capsys, *features)


def test_a_damaged_configuration_is_one_line(folders, tmp_path, capsys):
    """Also where only the tokenizer is needed."""
    shutil.copytree(folders / "pretrained", tmp_path / "model")
    for content in (b'{"model_type": "be', b"[]", b"[" * 100_000, b"\xff"):
        (tmp_path / "model/config.json").write_bytes(content)
        assert main(["tokenize", str(tmp_path / "model"), "a"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "model/config.json: found" in line


def test_cut_texts_are_counted_on_stderr(folders, capsys):
    assert main(["predict", "classify", str(folders / "classifier"), "cat " * 100, "cat"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[0])["cut_tokens"] == 102 - POSITIONS
    assert captured.err == (
        f"warning: {102 - POSITIONS} tokens of texts beyond the {POSITIONS} that the model reads were truncated\n"
    )


def test_folders_without_a_model_in_one_line(capsys, tmp_path):
    nothing, sweep, unfinished = tmp_path / "nothing", tmp_path / "sweep", tmp_path / "unfinished"
    sweep.mkdir()
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text("task: sst2\nmodel: bert-base-uncased\ntrain_file: train.tsv\n")
    assert f"model: found no folder {nothing}, expected" in error_of(capsys, "predict", "classify", nothing, "a film")
    assert f"model: found no model in the folder {sweep}" in error_of(capsys, "predict", "embed", sweep, "a film")
    for command in (["predict", "classify", unfinished, "a film"], ["export", unfinished]):
        assert f"{unfinished}: found a run of `cloze finetune` without its model" in error_of(capsys, *command)


@pytest.mark.parametrize("form", ["text", "json"])
def test_empty_lines_of_a_file_are_left_out_and_said(folders, capsys, tmp_path, form):
    texts, given = ["the cat", "the dog sat"], tmp_path / "texts"
    written = texts if form == "text" else [json.dumps({"text": text}) for text in texts]
    given.write_text(f"{written[0]}\n\n \t\n{written[1]}\n\n")
    embed = ["predict", "embed", folders / "pretrained", "--file", given, "--lines", form]
    for command in ([*embed, "--format", "json"], ["tokenize", folders / "pretrained", *embed[3:]]):
        assert main([str(word) for word in command]) == 0
        told = capsys.readouterr()
        assert [json.loads(line)["text"] for line in told.out.splitlines()] == texts
        assert told.err == f"warning: {given}: left out 3 empty lines (2, 3, 5)\n"
    # The rows of an array are found by the number of the line: behind the last text alone nothing is shifted.
    vectors = tmp_path / "vectors.npy"
    said = error_of(capsys, *embed, "--output", vectors)
    assert f"{given}:2: found an empty line, expected a text on each" in said and not vectors.exists()
    given.write_text("\n".join([*written, "", ""]))
    assert main([str(word) for word in (*embed, "--output", vectors)]) == 0
    assert len(np.load(vectors)) == 2 and "left out 1 empty line (3)" in capsys.readouterr().err


def test_wrong_inputs_in_one_line(folders, capsys, tmp_path, monkeypatch):
    model = folders / "pretrained"
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"the [MASK]\n\xff\xfe\n")
    assert f"{bad}:2: found bytes that are no UTF-8" in error_of(capsys, "predict", "fill-mask", model, "--file", bad)
    packed = tmp_path / "texts.txt.gz"
    packed.write_bytes(gzip.compress(b"a good line\n"))
    said = error_of(capsys, "predict", "fill-mask", model, "--file", packed)
    assert f"{packed}:1: found" in said and said.rstrip().endswith("of packed files only tables are read: unpack it")
    bad.write_bytes("the [MASK]\n".encode("utf-16-le"))
    assert f"{bad}:1: found a byte 0x00, as of UTF-16" in error_of(capsys, "predict", "fill-mask", model, "--file", bad)
    bad.write_text("the [MASK]\n\u200b\n")
    assert f"{bad}:2: found an empty text" in error_of(capsys, "predict", "fill-mask", model, "--file", bad)
    bad.write_text("a\tb\tc\n")
    assert f"{bad}:1: found 3 columns" in error_of(capsys, "predict", "embed", model, "--file", bad)
    bad.write_text('{"txt": "a"}\n')
    assert "found no text 'text'" in error_of(capsys, "predict", "embed", model, "--file", bad, "--lines", "json")
    bad.write_text('{"text": "a \\ud83d\\ude00"}\n{"text": "a \\ud83d"}\n')
    for command in (("predict", "embed"), ("predict", "score"), ("tokenize",)):
        assert rf"{bad}:2: found '\ud83d', half of a character, in 'a \ud83d'" in error_of(
            capsys, *command, model, "--file", bad, "--lines", "json"
        )
    bad.write_text("")
    assert "found no line, expected" in error_of(capsys, "predict", "embed", model, "--file", bad)
    bad.write_text("\n \n")
    assert "found no line but empty ones" in error_of(capsys, "predict", "embed", model, "--file", bad)
    assert "file: found no " in error_of(capsys, "predict", "embed", model, "--file", tmp_path / "none")
    assert "expected one of them" in error_of(capsys, "predict", "embed", model, "a", "--file", bad)
    assert "found no [MASK]" in error_of(capsys, "predict", "fill-mask", model, "no blank")
    assert "with the head for tag" in error_of(capsys, "predict", "tag", model, "a")
    assert "expected --context" in error_of(capsys, "predict", "answer", folders / "answerer", "who")
    assert "found one text, expected at least two" in error_of(capsys, "predict", "similarity", model, "a")
    assert "expected a whole number" in error_of(capsys, "predict", "fill-mask", model, "[MASK]", "--top_k", "many")
    (tmp_path / "odd").mkdir()
    save_model(tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"architectures": ["BertLMHeadModel"]}))
    assert "found architecture BertLMHeadModel" in error_of(capsys, "predict", "embed", tmp_path / "odd", "a")


@pytest.mark.parametrize("command", [("predict", "embed"), ("tokenize",)])
def test_who_reads_no_further_ends_it_quietly(folders, command, tmp_path):
    """As `| head -1`: nothing is said, and the status is that of a shell's tool."""
    (tmp_path / "texts").write_text("the cat sat\n" * 5000)
    process = subprocess.Popen(
        [sys.executable, "-m", "cloze", *command, str(folders / "pretrained"), "--file", str(tmp_path / "texts")],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_variables(OMP_NUM_THREADS="1"),
    )
    assert json.loads(process.stdout.readline())["text"] == "the cat sat"
    process.stdout.close()
    assert process.wait(60) == 141 and "Error" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("words", ["--help", "predict embed m a --print_config", "tokenize {model} cat --format table"])
def test_a_closed_output_ends_quietly(folders, words):
    words = words.format(model=folders / "pretrained")
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "cloze", *words.split()], cwd=ROOT, text=True, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_broken_pipe_elsewhere_is_an_error(monkeypatch):
    def broken(name, arguments):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(cli, "parse", broken)
    with monkeypatch.context() as without, pytest.raises(BrokenPipeError, match="of a worker"):
        without.setattr(sys, "stdout", io.StringIO())  # as a notebook's, it is no file of the system's
        main(["tokenize", "m", "a"])


WRONG = {  # words -> what is said, in words of ours
    "--datta x": "found --datta, which is no option; did you mean --data?",
    "--train.max_steps many": "--train.max_steps: found many, expected a whole number",
    "--train.precision bf17": "--train.precision: found bf17, expected one of: bf16, fp16, fp32, autocast",
    "--train.compile perhaps": "--train.compile: found perhaps, expected true or false",
    "--train.micro_batch_size x": "--train.micro_batch_size: found x, expected a whole number or auto",
    "--model nowhere.yaml": "--model: found no file nowhere.yaml",
    "--config nowhere.yaml": "nowhere.yaml, expected a YAML file",
    "--train.learning_rate": "--train.learning_rate: found no value",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said_in_words(capsys, words):
    error = error_of(capsys, "pretrain", "--data", "d", "--output", "o", *words.split())
    assert WRONG[words] in error
    assert not any(name in error for name in ("Parser key", "typing", "NoneType", "Subtypes", "Unable", " int"))
    assert "expected --output, found none" in error_of(capsys, "pretrain", "--data", "d")


def test_special_tokens_that_are_spelled_in_texts_are_said(folders, capsys):
    words = ["predict", "embed", str(folders / "pretrained"), "the cat [SEP] a film", "the sky", "[CLS] a film"]
    assert main([*words, "--format", "json"]) == 0
    assert "found 2 texts that spell a special token, such as [SEP]" in capsys.readouterr().err
    assert main(["predict", "fill-mask", str(folders / "pretrained"), "the [MASK] sat", "--format", "json"]) == 0
    assert "spell" not in capsys.readouterr().err
