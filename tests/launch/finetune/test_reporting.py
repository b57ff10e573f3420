"""What a run shows and leaves beside its metrics: confused classes, worst errors, curves, files for GLUE."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from cloze.launch.cli import main
from cloze.launch.run import runs
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launch.finetune.altered import damaged_at_the_end, fails_in_the_report, stopped_at_the_report
from tests.launch.finetune.examples.test_classification import read
from tests.launch.finetune.running import arguments, cells, finetune, lines
from tests.launch.finetune.small import sst2, write_tsv
from tests.launching import finish, weights
from tests.pipeline.corpus import contents


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """One epoch of SST-2, which leaves mistakes, with a test file as GLUE has them: numbered, without labels."""
    folder = tmp_path_factory.mktemp("run")
    test = write_tsv(folder / "test.tsv", ("index", "sentence"), [(number, f"w{number} fine") for number in range(3)])
    files = sst2(folder)
    _, said = finetune(
        "sst2", model, *files, folder / "run", "--epochs", 1, "--test", test, "--glue_submission", "true"
    )
    return folder / "run", [line.split("\t")[0] for line in files[1].read_text().splitlines()[1:]], said


def test_a_run_is_complete_once_its_results_are_written(model, files, tmp_path):
    """A stop or an error between the last step and results.json is in the status; the next start finishes the
    report."""
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
    for name in ("model/model.safetensors", "model/vocab.txt", "predictions/validation.jsonl", "results.json"):
        said = finish(ForkedRun(words, main=partial(damaged_at_the_end, name)), 2)
        assert f"{Path(name).name}" in said and "found " in said and "complete at" not in said
        assert json.loads((tmp_path / "run" / runs.STATUS).read_text())["state"] == "failed"
    said = finish(ForkedRun(words, main=partial(damaged_at_the_end, runs.CONFIG)))
    assert "complete at step 15" in said and "config.yaml was removed or emptied while" in said
    before = contents(tmp_path / "run")
    said = finish(ForkedRun([*words, "--evaluation.keep_best", "false"]), 2)
    assert "found a complete run with evaluation.keep_best True, expected False" in said
    after = contents(tmp_path / "run")
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"heartbeats/rank-00000.json"}
    said = " ".join(finish(ForkedRun([*words, "--evaluation.metric", "loss"])).split())
    assert "evaluation.metric: found loss, and the best checkpoint was chosen by accuracy when the run was made" in said
    assert "step 15 of 15, the last one" in said
    before = contents(tmp_path / "run")
    said = finish(ForkedRun([*words, "--evaluation.metric", "f1"]), 2)
    after = contents(tmp_path / "run")
    assert {name for name in before if before[name] != after[name]} <= {"heartbeats/rank-00000.json"}
    assert "evaluation.metric: found 'f1', expected one of what is measured here: accuracy, loss" in said


def test_confused_classes_and_worst_errors(run):
    output, texts, _ = run
    predictions = lines(output / "predictions" / "validation.jsonl")
    true, guessed = ([each[name] for each in predictions] for name in ("label", "prediction"))
    page = (output / "predictions" / "validation-mistakes.md").read_text()
    _, confusion, worst = page.split("## ")
    matrix = [[int(cell) for cell in row[1:]] for row in cells(confusion.partition("\n\n")[2])[1:]]
    labels = sorted({*true, *guessed})
    assert matrix == confusion_matrix(true, guessed, labels=labels).tolist()
    wrong = {
        each["place"]: 1 - each["probabilities"][each["label"]]
        for each in predictions
        if each["label"] != each["prediction"]
    }
    rows = cells(worst.partition("\n\n")[2])[1:]
    assert len(rows) == min(20, len(wrong)) > 0
    assert [row[0] for row in rows] == sorted(wrong, key=lambda place: -wrong[place])[:20]
    for place, text, label, guess, how in rows:
        number = int(place.removeprefix("row ")) - 2
        assert (text, label, guess) == (texts[number], true[number], guessed[number])
        assert float(how) == pytest.approx(wrong[place], abs=1e-4)


def test_the_confusion_is_a_picture_too(run):
    output, _, said = run
    picture = output / "predictions" / "validation-confusion.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and f"confusion {picture}\n" in said
    assert len(list(output.glob("predictions/*.png"))) == 1, "the test file has no labels"


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
    "sst2": ((), "accuracy"),
    "mrpc": ((), "f1 (of class 1), accuracy"),
    "classification": ((), "accuracy, f1_macro (mean over classes)"),
    "multi-label": (
        (),
        "f1_micro (over all labels together), f1_macro (mean over labels), exact_match (all labels of an example)",
    ),
    "regression": (
        ("--label_columns", "x", "y"),
        "pearson (mean over columns), spearman (mean over columns), mean_squared_error (mean over columns)",
    ),
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


def test_a_label_column_that_would_be_taken_for_the_mean_is_refused(model, tmp_path):
    path = write_tsv(tmp_path / "train.tsv", ("text", "mean", "x"), [("w1", n, n) for n in (0, 1)])
    with pytest.raises(UserError, match="label_columns: found the column 'mean', whose accuracy would be called"):
        read("label-columns", model, path, "--label_columns", "mean", "x")


def test_a_file_without_labels_is_predicted_and_submitted(run):
    output, _, said = run
    assert "no labels: predicted only" in said
    rows = (output / "predictions" / "glue" / "SST-2.tsv").read_text().splitlines()
    predictions = lines(output / "predictions" / "test-test.jsonl")
    assert rows == ["index\tprediction", *(f"{n}\t{each['prediction']}" for n, each in enumerate(predictions))]
    assert all(sum(each["probabilities"].values()) == pytest.approx(1) for each in predictions)


def test_two_test_files_of_one_name_are_refused(model, tmp_path, capsys, monkeypatch):
    files = sst2(tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dev.tsv").touch()
    assert (
        main(
            [
                "finetune",
                "sst2",
                "--model",
                str(model),
                "--train",
                str(files[0]),
                "--validation",
                str(files[1]),
                "--output",
                str(tmp_path / "run"),
                "--test",
                "a/dev.tsv",
                "b/dev.tsv",
            ]
        )
        == 2
    )
    assert "found 2 files named dev" in capsys.readouterr().err
