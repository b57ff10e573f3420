"""`cloze predict ... --file TABLE`: each record once, with the columns it came with."""

import csv
import gzip
import io
import json
import os
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cloze.launch.cli import main
from cloze.launch.finetune.examples.classification import _label_set
from cloze.launch.predict.labels import Classify, ClassifyConfig, Label, Labels
from cloze.launch.predict.operation import Row
from cloze.launch.predict.output import write_results
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.rows import read_rows
from cloze.launch.texts import tables
from cloze.launch.texts.tables import Columns
from cloze.pipeline.errors import UserError
from tests.launch.tiny_models import labels, save_model
from tests.terminal import terminal

TEXTS = ["the\rcat sat", 'a "good" film, and\na bad one', "the sky is blue"]  # quotes, a comma, a line's end


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    classifier = save_model(base / "classifier", "BertForSequenceClassification", **labels("bad", "good"))
    save_model(base / "chooser", "BertForMultipleChoice")
    save_model(base / "answerer", "BertForQuestionAnswering", seed=5)
    described = json.loads((classifier / "config.json").read_text())
    (classifier / "config.json").write_text(json.dumps(described | {"cloze_columns": {"texts": ["review"]}}))
    return base


def write(path, rows: list[dict], delimiter: str = ","):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def ask(capsys, *arguments) -> list[dict]:
    capsys.readouterr()
    assert main(["predict", *map(str, arguments), "--format", "json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(["predict", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def read(path) -> list[dict]:
    if path.suffix == ".tsv":  # as GLUE's: without quotes
        columns, *rows = [line.split("\t") for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
        return [dict(zip(columns, row, strict=True)) for row in rows]
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["csv", "semicolons", "tsv", "jsonl", "parquet", "csv.gz"])
def test_every_record_once_with_its_columns(folders, tmp_path, capsys, kind):
    texts = [re.sub(r"[\r\n]", " ", text) for text in TEXTS] if kind == "tsv" else TEXTS
    rows = [{"number": str(n), "review": text, "label": "bad"} for n, text in enumerate(texts)]
    if kind == "csv":
        path = write(tmp_path / "new.csv", rows)
    elif kind == "semicolons":
        path = write(tmp_path / "new.csv", rows, ";")
    elif kind == "csv.gz":
        path = tmp_path / "new.csv.gz"
        path.write_bytes(gzip.compress(write(tmp_path / "new.csv", rows).read_bytes()))
    elif kind == "tsv":
        path = tmp_path / "new.tsv"
        path.write_text("".join("\t".join(line) + "\n" for line in [rows[0], *(row.values() for row in rows)]))
    elif kind == "jsonl":
        path = tmp_path / "new.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "new.parquet")
    found = ask(capsys, "classify", folders / "classifier", "--file", path)
    model = Predictor.from_folder(folders / "classifier")
    assert [{name: each[name] for name in rows[0]} for each in found] == rows
    for each, text in zip(found, texts, strict=True):
        expected = model.classify(text)
        assert [label["label"] for label in each["labels"]] == [label.label for label in expected]
        assert each["labels"][0]["score"] == pytest.approx(expected[0].score, abs=1e-6)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
def test_results_become_a_table(folders, tmp_path, capsys, kind):
    texts = [re.sub(r"[\r\n]", " ", text) for text in TEXTS] if kind == "tsv" else TEXTS
    rows = [{"number": str(n), "review": text, "prediction": "old"} for n, text in enumerate(texts)]
    path, output = write(tmp_path / "new.csv", rows), tmp_path / f"results.{kind}"
    assert main(["predict", "classify", str(folders / "classifier"), "--file", str(path), "--output", str(output)]) == 0
    assert "3 results" in capsys.readouterr().out
    if kind == "jsonl":
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert [each["number"] for each in found] == ["0", "1", "2"] and "labels" in found[0]
        return
    found = pq.read_table(output).to_pylist() if kind == "parquet" else read(output)
    assert [{name: each[name] for name in rows[0]} for each in found] == rows  # nothing of the input is overwritten
    model = Predictor.from_folder(folders / "classifier")
    for each, text in zip(found, texts, strict=True):
        best, other = model.classify(text)
        assert each["cloze_prediction"] == best.label
        assert float(each[f"probability_{best.label}"]) == pytest.approx(best.score, abs=1e-6)
        assert float(each[f"probability_{other.label}"]) == pytest.approx(other.score, abs=1e-6)


def test_a_file_whose_columns_are_named_has_a_first_line_of_names(tmp_path):
    """Of CoLA, whose own files have none, alone a TSV file without them is read by its columns."""
    learned = Columns(("sentence",), header=("source", "label", "star", "sentence"))
    (tmp_path / "own.csv").write_text("id,review\n1,fine\n")
    (tmp_path / "own.tsv").write_text("id\treview\n1\tfine\n")
    (tmp_path / "cola.tsv").write_text("x\t1\t\tfine\n")
    for name in ("own.csv", "own.tsv"):
        asked = ClassifyConfig("m", file=str(tmp_path / name), text_columns=["review"])
        assert [row.text for row in read_rows(asked, learned)] == ["fine"]
    assert [row.text for row in read_rows(ClassifyConfig("m", file=str(tmp_path / "cola.tsv")), learned)] == ["fine"]
    with pytest.raises(UserError, match="found the columns 'id', 'review', expected one named 'sentence'"):
        list(read_rows(ClassifyConfig("m", file=str(tmp_path / "own.csv")), learned))


@pytest.mark.parametrize("name", ["A.CSV", "A.TSV", "A.JSONL", "A.CSV.GZ", "A.Json"])
def test_endings_in_capitals_are_those_in_small_letters(tmp_path, name):
    """As of files from Windows: before, the header and whole lines were the texts."""
    lines = {"CSV": "text,n\nfine,1\n", "TSV": "text\tn\nfine\t1\n"}
    content = lines.get(name.split(".")[1], '{"text": "fine", "n": 1}\n').encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert [row.text for row in read_rows(ClassifyConfig("m", file=str(tmp_path / name)))] == ["fine"]
    (tmp_path / "A.CONLL").write_text("w1 O\n")
    with pytest.raises(UserError, match="A.CONLL, CoNLL by its name"):
        list(read_rows(ClassifyConfig("m", file=str(tmp_path / "A.CONLL"))))


@pytest.mark.parametrize("name", ["p.txt", "p", "p.csv", "p.jsonl", "p.jsonl.gz", "p.parquet"])
def test_a_file_that_is_written_while_it_is_read_gives_no_results(tmp_path, name):
    """Cut at the end of a line, or the same bytes written again: what was read may be of two states."""
    path, texts = tmp_path / name, [f"text {number}" for number in range(20_000)]
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": texts}), path)
    else:
        lines = [json.dumps({"text": text}) for text in texts] if "json" in name else ["text", *texts]
        content = "".join(f"{line}\n" for line in lines).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = read_rows(ClassifyConfig("m", file=str(path)))
    next(rows)
    if name in ("p.txt", "p", "p.csv", "p.jsonl"):
        os.truncate(path, path.read_bytes().rindex(b"\n", 0, -1) + 1)
    else:
        with open(path, "r+b") as file:
            file.write(path.read_bytes()[:1])
    with pytest.raises(UserError, match=f"{name}: changed while it was read, expected a file at rest"):
        list(rows)


def test_standard_input_of_a_file_that_is_written_meanwhile_gives_no_results(tmp_path, monkeypatch):
    path = tmp_path / "p.txt"
    path.write_text("".join(f"text {number}\n" for number in range(20_000)))
    with open(path) as opened:
        monkeypatch.setattr("sys.stdin", opened)
        rows = read_rows(ClassifyConfig("m"))
        next(rows)
        with open(path, "a") as more:
            more.write("another\n")
        with pytest.raises(UserError, match="standard input: changed while it was read, expected a file at rest"):
            list(rows)


def test_standard_input_that_fails_is_a_line(tmp_path, monkeypatch):
    """Opened only for writing, as by `0> FILE`."""
    descriptor = os.open(tmp_path / "p.txt", os.O_WRONLY | os.O_CREAT)
    with open(descriptor, "rb") as opened:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(opened))
        with pytest.raises(UserError, match="standard input: Bad file descriptor; expected lines of texts"):
            list(read_rows(ClassifyConfig("m")))


@pytest.mark.parametrize("name", ["p.parquet", "p.csv", "p.tsv", "p.jsonl", "p.jsonl.gz"])
def test_a_pipe_is_no_table(tmp_path, name):
    """Its reading waited for a writer without a word."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="found no regular file, expected one"):
        list(read_rows(ClassifyConfig("m", file=str(tmp_path / name))))


@pytest.mark.parametrize("text", ["w1\tw2", "w1\nw2", "w1\r"])
def test_a_cell_that_tsv_cannot_hold_is_refused(folders, tmp_path, capsys, text):
    path, output = write(tmp_path / "new.csv", [{"review": "w1"}, {"review": text}]), tmp_path / "results.tsv"
    line = refused(capsys, "classify", folders / "classifier", "--file", path, "--output", output)
    assert f"results.tsv: found a tab or a line end in {text!r}" in line and not output.exists()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_independent_labels_are_a_list_in_the_model_s_order_and_none_is_said(tmp_path, kind):
    """A blank would be a missing value, and the order of the probabilities differs between rows."""
    names = ["red", "10", "2"]
    folder = save_model(
        tmp_path / "model", "BertForSequenceClassification", problem_type="multi_label_classification", **labels(*names)
    )
    chances = [(0.1, 0.2, 0.3), (0.6, 0.1, 0.9), (0.9, 0.8, 0.7)]
    results = []
    for number, each in enumerate(chances):
        given = sorted(map(Label, names, each), key=lambda label: -label.score)
        results.append((Row(f"text {number}"), Labels(given, 0)))
    path = tmp_path / f"results.{kind}"
    write_results(path, Classify(), Predictor.from_folder(folder).loaded, results)
    found = pq.read_table(path).to_pylist() if kind == "parquet" else read(path)
    expected = [[], ["red", "2"], names]
    for each, chosen in zip(found, expected, strict=True):
        assert list(each) == ["text", "prediction", *(f"probability_{name}" for name in names), "cut_tokens"]
        assert each["prediction"] == (chosen if kind == "parquet" else json.dumps(chosen))
        # What is predicted can be learned from.
        assert _label_set(tables.TableRow(each, "row 2"), "prediction") == chosen
    write_results(path, Classify(), Predictor.from_folder(folder).loaded, results[:1] * 4096 + results)


def test_columns_by_name(folders, tmp_path, capsys):
    rows = [{"first": "the cat", "second": "sat", "text": "the sky"}]
    path = write(tmp_path / "new.csv", rows)
    shutil.copytree(folders / "classifier", tmp_path / "others")
    described = json.loads((tmp_path / "others/config.json").read_text())
    assert described.pop("cloze_columns") == {"texts": ["review"]}, "it takes no pairs"
    (tmp_path / "others/config.json").write_text(json.dumps(described))
    model = Predictor.from_folder(tmp_path / "others")
    (pair,) = ask(capsys, "classify", tmp_path / "others", "--file", path, "--text_columns", "first", "second")
    assert pair["labels"][0]["score"] == pytest.approx(model.classify("the cat", "sat")[0].score, abs=1e-6)
    asked = ("classify", folders / "classifier", "--file", path)
    (own,) = ask(capsys, *asked)  # no column `review`, which it has learned from: by the operation's name
    assert own["labels"][0]["score"] == pytest.approx(model.classify("the sky")[0].score, abs=1e-6)


def test_choices_and_answers(folders, tmp_path, capsys):
    rows = [{"begin": "the man went to the", "a": "store .", "b": "sky ."}]
    path, output = write(tmp_path / "choices.csv", rows), tmp_path / "chosen.csv"
    best = Predictor.from_folder(folders / "chooser").choose("the man went to the", ["store .", "sky ."])[0]
    assert (
        main(
            [
                "predict",
                "choose",
                str(folders / "chooser"),
                "--file",
                str(path),
                "--text_columns",
                "begin",
                "a",
                "b",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    (found,) = read(output)
    assert (found["choice"], found["number"]) == (best.text, str(best.number))
    rows = [{"id": "7", "context": "the man went to the store .", "question": "who went ?"}]
    path = write(tmp_path / "questions.csv", rows)
    assert main(["predict", "answer", str(folders / "answerer"), "--file", str(path), "--output", str(output)]) == 0
    (found,) = read(output)
    span = Predictor.from_folder(folders / "answerer").answer("who went ?", "the man went to the store .")[0]
    assert (found["id"], found["answer"], found["start"]) == ("7", span.text, str(span.start))
    assert found["answered"] == "true"
    words = ("--output", str(output), "--allow_no_answer", "true")
    rows = [{"context": "the", "question": f"{who} {'the cat ' * 6}"} for who in ("who", "where", "a", "new", "is")]
    path = write(tmp_path / "questions.csv", rows)
    assert main(["predict", "answer", str(folders / "answerer"), "--file", str(path), *words]) == 0
    found = read(output)
    assert {(each["answered"], bool(each["answer"])) for each in found} >= {("false", False)}
    assert all(each["answered"] == json.dumps(bool(each["answer"])) for each in found)


def test_refusals_name_the_record(folders, tmp_path, capsys):
    asked = ("classify", folders / "classifier", "--file")
    path = tmp_path / "new.csv"
    path.write_text('review,label\n"one\nrecord",a\ntwo,b,c\n')
    line = refused(capsys, *asked, path)
    assert "row 3 (line 4): found 3 fields, expected 2" in line and "skip_malformed" not in line
    path.write_text("a,b\n1,2\n")
    line = refused(capsys, *asked, path)
    assert "found the columns 'a', 'b', expected one named 'review'" in line and "--text_columns" in line
    line = refused(capsys, *asked, path, "--text_columns", "c", "d")
    assert "expected 'c' and 'd'" in line
    pq.write_table(pa.table({"review": ["a", None]}), path := tmp_path / "new.parquet")
    assert "row 2: found None in column 'review', expected a text" in refused(capsys, *asked, path)
    assert "lines: found json with texts on the command line" in refused(
        capsys, "classify", folders / "classifier", "a", "--lines", "json"
    )
    for texts in (("a",), ("--file", "-"), ()):
        assert "--file" in refused(capsys, "classify", folders / "classifier", *texts, "--text_columns", "b")


def test_results_do_not_replace_the_texts(folders, tmp_path, capsys, monkeypatch):
    write(tmp_path / "new.csv", [{"review": "the sky"}])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked.csv").symlink_to("new.csv")
    for file, output in (("new.csv", tmp_path / "new.csv"), (f"../{tmp_path.name}/new.csv", "new.csv")):
        line = refused(capsys, "classify", folders / "classifier", "--file", file, "--output", output)
        assert "new.csv, the file of the texts, which it would replace" in line
    line = refused(capsys, "classify", folders / "classifier", "--file", "linked.csv", "--output", "new.csv")
    assert "new.csv, the file of the texts, which it would replace" in line
    with open("new.csv") as texts:
        stdin = os.dup(0)
        os.dup2(texts.fileno(), 0)
        try:
            for file in ((), ("--file", "-")):
                line = refused(capsys, "classify", folders / "classifier", *file, "--output", "new.csv")
                assert "new.csv, the file of the texts, which it would replace" in line
        finally:
            os.dup2(stdin, 0)
            os.close(stdin)
    assert main(["evaluate", "m", "--suite", "lines", "--data", "new.csv", "--json", f"{tmp_path}/new.csv"]) == 2
    assert "json: found" in capsys.readouterr().err
    assert (tmp_path / "new.csv").read_text().split() == ["review", "the", "sky"]


@pytest.mark.parametrize("texts", [(), ("--file", "-"), ("--file", "new.csv")])
def test_a_second_text_for_the_command_line_is_not_ignored_beside_rows(folders, capsys, texts):
    for operation, model, option in (
        ("classify", "classifier", "pair"),
        ("embed", "classifier", "pair"),
        ("answer", "answerer", "context"),
    ):
        line = refused(capsys, operation, folders / model, *texts, f"--{option}", "the mat")
        assert f"{option}: found 'the mat' without texts on the command line, expected none" in line
    assert "context: found none" in refused(capsys, "answer", folders / "answerer", "who sat?")


@pytest.mark.parametrize("name", ["new.txt", "new.jsonl", "new.jsonl.gz", "new.csv"])
def test_endless_lines_and_texts_are_refused_before_they_fill_the_memory(folders, tmp_path, capsys, monkeypatch, name):
    """A gzip file of 300 kB holds a line of 300 MB."""
    monkeypatch.setattr(tables, "LONGEST_LINE", 100)
    monkeypatch.setattr("cloze.launch.texts.encoding._MOST_CHARACTERS", 50)
    path, before = tmp_path / name, "text\n" if name == "new.csv" else ""
    asked = ("embed", folders / "answerer", "--file", path, *([] if name == "new.txt" else ["--text_columns", "text"]))
    for length, expected in (
        (40, None),
        (60, "found a text of 60 characters, expected at most 50"),
        (120, "a line of"),
    ):
        text = "a" * length
        line = before + (json.dumps({"text": text}) if ".jsonl" in name else text) + "\n"
        with (gzip.open if name.endswith(".gz") else open)(path, "wt") as file:
            file.write(line)
        if expected:
            assert expected in refused(capsys, *asked)
        else:
            assert ask(capsys, *asked)


def test_a_late_column_is_not_lost(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cloze.launch.predict.output._CHUNK", 2)
    path, output = tmp_path / "new.jsonl", tmp_path / "results.csv"
    path.write_text("".join(json.dumps({"review": "the cat"} | extra) + "\n" for extra in ({}, {}, {"more": 1})))
    asked = ("classify", folders / "classifier", "--file", path, "--output", output)
    assert "'more'" in refused(capsys, *asked) and not output.exists()


def test_a_terminal_shows_how_far_it_is(folders, tmp_path, monkeypatch):
    path = write(tmp_path / "new.csv", [{"review": text} for text in TEXTS])
    with terminal() as (stream, shown):
        monkeypatch.setattr("sys.stderr", stream)
        status = main(
            [
                "predict",
                "classify",
                str(folders / "classifier"),
                "--file",
                str(path),
                "--output",
                str(tmp_path / "results.csv"),
            ]
        )
        monkeypatch.undo()
    assert status == 0 and b"3 texts" in bytes(shown)
