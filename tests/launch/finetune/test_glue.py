"""Files of predictions as gluebenchmark.com takes them."""

import numpy as np
import pytest

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.finetune.glue import submission, submission_names
from tests.launch.finetune.examples.test_classification import GLUE, read
from tests.launch.finetune.small import write_tsv

# Label forms, as gluebenchmark.com's training files have them; an index from 0.
FORMS = {
    "cola": ("CoLA", "01"),
    "sst2": ("SST-2", "01"),
    "mrpc": ("MRPC", "01"),
    "qqp": ("QQP", "01"),
    "wnli": ("WNLI", "01"),
    "qnli": ("QNLI", ("entailment", "not_entailment")),
    "rte": ("RTE", ("entailment", "not_entailment")),
    "mnli": ("MNLI-mm", ("entailment", "neutral", "contradiction")),
    "stsb": ("STS-B", None),
}
TEST_COLUMNS = {
    "cola": ("index", "sentence"),
    "mrpc": ("index", "#1 ID", "#2 ID", "#1 String", "#2 String"),
    "qqp": ("id", "question1", "question2"),
}  # the other test files have those of the training file


def config_of(task: str, *overrides: str):
    return parse("finetune", [task, "--model", "m", "--train", "t", "--validation", "v", "--output", "o", *overrides])


@pytest.mark.parametrize("task", FORMS)
def test_submissions_have_names_and_label_forms_of_glue(model, tmp_path, task):
    name, labels = FORMS[task]
    header, row, _ = GLUE[task]
    train = write_tsv(tmp_path / "train.tsv", header, [row, row])
    columns = TEST_COLUMNS.get(task) or tuple(
        column for column in header if column not in ("label", "score", "gold_label", "label1")
    )
    test = write_tsv(
        tmp_path / ("test_mismatched.tsv" if task == "mnli" else "test.tsv"),
        columns,
        [tuple(f"w{number}" for _ in columns) for number in range(4)],
    )
    _, _, _, _, (examples,) = read(task, model, train, "--test", test)
    assert not examples.labelled
    outputs = np.random.default_rng(0).normal(size=(4, examples.width)).astype(np.float32)
    outputs[:2] = [[-1.5] * examples.width, [5.0004] * examples.width] if labels is None else outputs[:2]
    rows = [line.split("\t") for line in submission(examples.predictions(outputs)).splitlines()]
    assert rows[0] == ["index", "prediction"] and [row[0] for row in rows[1:]] == ["0", "1", "2", "3"]
    if labels is None:
        assert [row[1] for row in rows[1:3]] == ["0.000", "5.000"] and all(0 <= float(row[1]) <= 5 for row in rows[1:])
    else:
        assert {row[1] for row in rows[1:]} <= set(labels)
    config = config_of(task, "--test", str(test), "--glue_submission", "true")
    assert submission_names(config) == {test.stem: f"{name}.tsv"}


def test_the_three_submissions_of_mnli():
    files = [f"MNLI/{name}.tsv" for name in ("test_matched", "test_mismatched", "diagnostic")]
    assert set(submission_names(config_of("mnli", "--test", *files, "--glue_submission", "true")).values()) == {
        "MNLI-m.tsv",
        "MNLI-mm.tsv",
        "AX.tsv",
    }
    assert submission_names(config_of("mnli", "--test", *files)) == {}


@pytest.mark.parametrize(
    "task, options, said",
    [
        ("classification", ("--test", "test.tsv"), "the task classification, expected one of GLUE's"),
        ("sst2", (), "no test file"),
        ("mnli", ("--test", "mine.tsv"), "mine.tsv, expected one of the names test_matched"),
        ("mnli", ("--test", "ax.tsv", "diagnostic.tsv"), "two test files that would both be AX.tsv"),
        ("sst2", ("--test", "test.tsv", "--labels", "bad", "good"), "--labels"),
        ("qnli", ("--test", "test.tsv", "--skip_malformed_rows", "true"), "--skip_malformed_rows"),
    ],
)
def test_what_is_no_submission_is_refused_at_once(model, tmp_path, capsys, monkeypatch, task, options, said):
    """Before the files, which are empty, are read."""
    monkeypatch.chdir(tmp_path)
    for name in ("given.tsv", *(option for option in options if option.endswith(".tsv"))):
        (tmp_path / name).touch()
    assert (
        main(
            [
                "finetune",
                task,
                "--model",
                str(model),
                "--train",
                "given.tsv",
                "--validation",
                "given.tsv",
                "--output",
                str(tmp_path / "run"),
                "--glue_submission",
                "true",
                *options,
            ]
        )
        == 2
    )
    error = capsys.readouterr().err.strip()
    assert "glue_submission: found" in error and said in error and len(error.splitlines()) == 1
