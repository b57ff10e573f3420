"""What a run shows and leaves beside its metrics: confused classes, worst errors, curves, files for GLUE."""

import json
import os
import signal

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, multilabel_confusion_matrix
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from cloze.launch.cli import main, parse
from cloze.launch.finetune import reporting
from cloze.launch.finetune.error_analysis import tables
from cloze.launch.finetune.examples import predicted
from cloze.launch.finetune.glue import submission, submission_names
from cloze.launch.run import runs
from tests.forked import ForkedRun
from tests.launch.finetune.examples.test_classification import GLUE, read
from tests.launch.finetune.running import arguments, finetune, lines
from tests.launch.finetune.small import sst2, write_tsv
from tests.launching import finish, weights


def cells(table: str) -> list[list[str]]:
    """Rows of a table in Markdown, its header first, the line below it left out."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.strip().split("\n")]
    return rows[:1] + rows[2:]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """One epoch of SST-2, which leaves mistakes, with a test file as GLUE has them: numbered, without labels."""
    folder = tmp_path_factory.mktemp("run")
    test = write_tsv(folder / "test.tsv", ("index", "sentence"), [(number, f"w{number} fine") for number in range(3)])
    files = sst2(folder)
    _, said = finetune("sst2", model, *files, folder / "run", "--epochs", 1, "--test", test,
                       "--glue_submission", "true")
    return folder / "run", [line.split("\t")[0] for line in files[1].read_text().splitlines()[1:]], said


def stopped_at_the_report(command: list[str]) -> int:
    save = reporting.save_model

    def stopping(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    reporting.save_model = stopping
    return main(command)


def fails_in_the_report(command: list[str]) -> int:
    def failing(*_):
        raise MemoryError("nothing left")

    reporting.save_model = failing
    return main(command)


def test_a_run_is_complete_once_its_results_are_written(model, files, tmp_path):
    """A stop or an error between the last step and results.json is told by the status; the next start makes up."""
    words = arguments("sst2", model, *files, tmp_path / "run", "--epochs", 1, "--freeze", "encoder")
    said = finish(ForkedRun(words, main=fails_in_the_report), 1)
    assert json.loads((tmp_path / "run" / runs.STATUS).read_text()) == {"state": "failed", "step": 15}
    whole = sum(tensor.numel() for tensor in weights(tmp_path / "run").values())
    assert f"{whole:,}, of which {32 * 33 + 2 * 33:,} learn" in said, "the pooler and the classifier"
    said = finish(ForkedRun(words, main=stopped_at_the_report), 75)
    assert json.loads((tmp_path / "run" / runs.STATUS).read_text()) == {"state": "requeue", "step": 15}
    assert "stopped with a checkpoint of step 15; the same command" in said
    assert not (tmp_path / "run" / "results.json").exists()
    assert "complete at step 15" in finish(ForkedRun(words))
    assert json.loads((tmp_path / "run" / runs.STATUS).read_text()) == {"state": "complete", "step": 15}
    assert json.loads((tmp_path / "run" / "results.json").read_text())["steps"] == 15


def test_confused_classes_and_worst_errors(run):
    output, texts, _ = run
    predictions = lines(output / "predictions" / "validation.jsonl")
    true, guessed = ([each[name] for each in predictions] for name in ("label", "prediction"))
    page = (output / "predictions" / "validation-mistakes.md").read_text()
    _, confusion, worst = page.split("## ")
    matrix = [[int(cell) for cell in row[1:]] for row in cells(confusion.partition("\n\n")[2])[1:]]
    labels = sorted({*true, *guessed})
    assert matrix == confusion_matrix(true, guessed, labels=labels).tolist()
    wrong = {each["place"]: 1 - each["probabilities"][each["label"]] for each in predictions
             if each["label"] != each["prediction"]}
    rows = cells(worst.partition("\n\n")[2])[1:]
    assert len(rows) == min(20, len(wrong)) > 0
    assert [row[0] for row in rows] == sorted(wrong, key=lambda place: -wrong[place])[:20]
    for place, text, label, guess, how in rows:
        number = int(place.removeprefix("row ")) - 2
        assert (text, label, guess) == (texts[number], true[number], guessed[number])
        assert float(how) == pytest.approx(wrong[place], abs=1e-4)


def test_tensorboard_has_the_tables_and_the_curve_of_precision_over_recall(run):
    output, _, _ = run
    events = EventAccumulator(str(output), {"tensors": 0}).Reload()
    assert {"validation/confusion/text_summary", "validation/worst/text_summary"} <= set(events.Tags()["tensors"])
    last = events.Tensors("validation/precision and recall of 1")[-1]
    predictions = lines(output / "predictions" / "validation.jsonl")
    positive = np.array([each["label"] == "1" for each in predictions])
    scores = np.array([each["probabilities"]["1"] for each in predictions])
    curve = make_ndarray(last.tensor_proto)  # six rows: true and false positives, negatives, precision, recall
    thresholds = np.linspace(0, 1, curve.shape[1])
    assert last.step == 15, "the evaluation of the last step, which is the reported one"
    for at in (0, 30, 60, 90):
        guessed = scores >= thresholds[at]
        assert curve[:2, at].tolist() == [(guessed & positive).sum(), (guessed & ~positive).sum()]


AVERAGED = {
    "sst2": ((), "accuracy"), "mrpc": ((), "f1 (of class 1), accuracy"),
    "classification": ((), "accuracy, f1_macro (mean over classes)"),
    "multi-label": ((), "f1_micro (over all labels together), f1_macro (mean over labels), exact_match (all labels of "
                        "an example)"),
    "regression": (("--label_columns", "x", "y"), "pearson (mean over columns), spearman (mean over columns), "
                                                  "mean_squared_error (mean over columns)"),
    "label-columns": (("--label_columns", "labels", "x"), "accuracy_mean (mean over columns)"),
    "multiple-choice": (("--choice_columns", "sentence", "text", "--labels", "0", "1"), "accuracy"),
}


@pytest.mark.parametrize("task", AVERAGED)
def test_what_is_averaged_is_said(model, tmp_path, task):
    """Of tags: tests/launch/finetune/test_chinese.py, which reads it in what a run prints."""
    options, said = AVERAGED[task]
    header = ("text", "sentence", "#1 String", "#2 String", "Quality", "label", "labels", "x", "y")
    path = write_tsv(tmp_path / "train.tsv", header, [("w1", "w1", "w1", "w2", n, n, "a,b", n, n) for n in (0, 1)])
    assert read(task, model, path, *options)[3].measured == said


def test_a_file_without_labels_is_predicted_and_submitted(run):
    output, _, said = run
    assert "no labels: predicted only" in said
    rows = (output / "predictions" / "glue" / "SST-2.tsv").read_text().splitlines()
    predictions = lines(output / "predictions" / "test-test.jsonl")
    assert rows == ["index\tprediction", *(f"{n}\t{each['prediction']}" for n, each in enumerate(predictions))]
    assert all(sum(each["probabilities"].values()) == pytest.approx(1) for each in predictions)


def entries(kind: str) -> list[dict]:
    """Predictions as each kind of task describes them, the first one right, the others ever more wrong."""
    if kind == "columns":
        chances = [{"size": {"s": p, "l": 1 - p}, "kind": {"a": 0.6, "b": 0.4}} for p in (0.9, 0.4, 0.1)]
        return [{"place": f"row {n}", "label": {"size": "s", "kind": "a"}, "probabilities": each,
                 "prediction": {"size": max(each["size"], key=each["size"].get), "kind": "a"}}
                for n, each in enumerate(chances)]
    if kind == "labels":
        return [{"place": f"row {n}", "label": ["x"], "prediction": ["x", "y"] if p > 0.5 else ["x"],
                 "probabilities": {"x": 0.8, "y": p}} for n, p in enumerate((0.1, 0.6, 0.9))]
    if kind == "numbers":
        return [{"place": f"row {n}", "label": 2.0, "prediction": 2.0 + n} for n in range(3)]
    if kind == "tags":
        return [{"place": f"row {n}", "words": ["a", "b"], "label": ["O", "B-x"], "prediction": ["O", tag],
                 "probabilities": [0.9, p]} for n, (tag, p) in enumerate([("B-x", 0.7), ("O", 0.5), ("O", 0.8)])]
    return [{"id": f"row {n}", "label": ["yes"], "prediction": text, "probability": p}
            for n, (text, p) in enumerate([("yes", 0.9), ("no", 0.3), ("well", 0.5)])]


KINDS = {"columns": predicted.ClassOfEachColumn, "labels": predicted.Labels, "numbers": predicted.Number,
         "tags": predicted.Tags, "answers": predicted.Answer}


class Texts:
    """Of examples, what the tables need."""

    def __init__(self, kind) -> None:
        self.kind = kind

    def text(self, number: int) -> str:
        return f"the | text\n{number}"


@pytest.mark.parametrize("kind, confusions", [
    ("columns", {"confusion size": [["true \\ predicted", "l", "s"], ["l", "0", "0"], ["s", "2", "1"]],
                 "confusion kind": [["true \\ predicted", "a"], ["a", "3"]]}),
    ("labels", {"confusion": [["label", "true and predicted", "true, not predicted", "predicted, not true", "neither"],
                              ["x", "3", "0", "0", "0"], ["y", "0", "0", "2", "1"]]}),
    ("numbers", {}), ("answers", {}),
    ("tags", {"confusion": [["true \\ predicted", "B-x", "O"], ["B-x", "1", "2"], ["O", "0", "3"]]}),
])
def test_every_kind_of_task_has_its_tables(kind, confusions):
    found = tables(Texts(KINDS[kind]), entries(kind))
    worst = cells(found.pop("worst"))
    assert [row[0] for row in worst[1:]] == ["row 2", "row 1"] and worst[1][1] == "the \\| text 2"
    assert {name: cells(table) for name, table in found.items()} == confusions
    assert KINDS[kind].binary_scores(entries(kind)) is None


def test_independent_labels_are_counted_as_sklearn_does():
    """Of 40 labels the 30 with the most errors."""
    rng = np.random.default_rng(0)
    true, guessed = rng.random((2, 50, 40)) < rng.uniform(0.1, 0.9, 40)
    names = [f"l{number}" for number in range(40)]

    def named(row) -> list[str]:
        return [name for name, on in zip(names, row, strict=True) if on]

    predictions = [{"place": "p", "label": named(a), "prediction": named(b), "probabilities": dict.fromkeys(names, 0.5)}
                   for a, b in zip(true, guessed, strict=True)]
    _, *rows = cells(tables(Texts(predicted.Labels), predictions)["confusion"])
    expected = {name: [matrix[1, 1], matrix[1, 0], matrix[0, 1], matrix[0, 0]] for name, matrix in
                zip(names, multilabel_confusion_matrix(true, guessed), strict=True)}
    errors = sorted((each[1] + each[2] for each in expected.values()), reverse=True)
    assert all(expected[name] == [int(cell) for cell in counts] for name, *counts in rows)
    assert [int(row[2]) + int(row[3]) for row in rows] == errors[:30]


def test_of_very_many_classes_the_pairs_that_are_confused_most():
    pairs = [(str(n), str(n // 2)) for n in range(40)] + [("7", "9")] * 3
    predictions = [{"place": "p", "label": true, "prediction": guessed, "probabilities": {true: 0.5}}
                   for true, guessed in pairs]
    assert cells(tables(Texts(predicted.OneClass), predictions)["confusion"])[1] == ["7", "9", "3"]


# Label forms, as gluebenchmark.com's training files have them; an index from 0.
FORMS = {"cola": ("CoLA", "01"), "sst2": ("SST-2", "01"), "mrpc": ("MRPC", "01"), "qqp": ("QQP", "01"),
         "wnli": ("WNLI", "01"), "qnli": ("QNLI", ("entailment", "not_entailment")),
         "rte": ("RTE", ("entailment", "not_entailment")),
         "mnli": ("MNLI-mm", ("entailment", "neutral", "contradiction")), "stsb": ("STS-B", None)}
TEST_COLUMNS = {"cola": ("index", "sentence"), "mrpc": ("index", "#1 ID", "#2 ID", "#1 String", "#2 String"),
                "qqp": ("id", "question1", "question2")}  # the other test files have those of the training file


@pytest.mark.parametrize("task", FORMS)
def test_submissions_have_names_and_label_forms_of_glue(model, tmp_path, task):
    name, labels = FORMS[task]
    header, row, _ = GLUE[task]
    train = write_tsv(tmp_path / "train.tsv", header, [row, row])
    columns = TEST_COLUMNS.get(task) or tuple(column for column in header if column not in ("label", "score",
                                                                                          "gold_label", "label1"))
    test = write_tsv(tmp_path / ("test_mismatched.tsv" if task == "mnli" else "test.tsv"), columns,
                     [tuple(f"w{number}" for _ in columns) for number in range(4)])
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


def config_of(task: str, *overrides: str):
    return parse("finetune", [task, "--model", "m", "--train", "t", "--validation", "v", "--output", "o", *overrides])


def test_the_three_submissions_of_mnli():
    files = [f"MNLI/{name}.tsv" for name in ("test_matched", "test_mismatched", "diagnostic")]
    assert set(submission_names(config_of("mnli", "--test", *files, "--glue_submission", "true")).values()) == {
        "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"}
    assert submission_names(config_of("mnli", "--test", *files)) == {}


@pytest.mark.parametrize("task, options, said", [
    ("classification", ("--test", "test.tsv"), "the task classification, expected one of GLUE's"),
    ("sst2", (), "no test file"),
    ("mnli", ("--test", "mine.tsv"), "mine.tsv, expected one of the names test_matched"),
    ("mnli", ("--test", "ax.tsv", "diagnostic.tsv"), "two test files that would both be AX.tsv"),
    ("sst2", ("--test", "test.tsv", "--labels", "bad", "good"), "--labels"),
    ("qnli", ("--test", "test.tsv", "--skip_malformed_rows", "true"), "--skip_malformed_rows"),
])
def test_what_is_no_submission_is_refused_at_once(model, tmp_path, capsys, monkeypatch, task, options, said):
    """Before the files, which are empty, are read."""
    monkeypatch.chdir(tmp_path)
    for name in ("given.tsv", *(option for option in options if option.endswith(".tsv"))):
        (tmp_path / name).touch()
    assert main(["finetune", task, "--model", str(model), "--train", "given.tsv", "--validation", "given.tsv",
                 "--output", str(tmp_path / "run"), "--glue_submission", "true", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert "glue_submission: found" in error and said in error and len(error.splitlines()) == 1


def test_two_test_files_of_one_name_are_refused(model, tmp_path, capsys, monkeypatch):
    files = sst2(tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dev.tsv").touch()
    assert main(["finetune", "sst2", "--model", str(model), "--train", str(files[0]), "--validation", str(files[1]),
                 "--output", str(tmp_path / "run"), "--test", "a/dev.tsv", "b/dev.tsv"]) == 2
    assert "found 2 files named dev" in capsys.readouterr().err
