"""`cloze evaluate` against plain loops over transformers' own models, and over the checkpoints of a real run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cloze.launch.checkpoint.deepspeed_files import MODEL_FILE
from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from tests.launch.checkpoint.small_checkpoints import rewrite
from tests.launch.evaluate.plain_scores import write_pairs
from tests.launching import train, weights
from tests.synthetic import make_shards

FALLING = (
    *("--train.max_steps", "6", "--checkpoint.every_steps", "2", "--checkpoint.keep_last", "3"),
    *("--masking.rate", "0.5", "--masking.final_rate", "0.1"),
)  # three checkpoints, between which the masking rate falls


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with three checkpoints whose masking rate falls, and a folder of pairs of its words."""
    folder = tmp_path_factory.mktemp("run")
    data = make_shards(folder / "data", mask_sets=0, pairs=False)
    output = train(data, folder / "run", *FALLING)
    assert "complete" in (folder / "run" / "status.json").read_text(), output
    (folder / "pairs").mkdir()
    rows = [
        {"sentence_good": f"w{n} w{n + 1} w{n + 2} w{n + 3}", "sentence_bad": f"w{n} w{n + 9} w{n + 2} w{n + 3}"}
        for n in range(40)
    ]
    (folder / "pairs" / "cycle.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluated(run, *arguments) -> dict:
    path = run / "found.json"
    assert main(["evaluate", *arguments, "--data", str(run / "pairs"), "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cloze.launch.system.pictures.find_spec", lambda name: None)
    data, found = write_pairs(tmp_path / "pairs"), tmp_path / "found.json"
    assert (
        main(
            [
                "evaluate",
                str(model),
                "--suite",
                "blimp",
                "--data",
                str(data),
                "--json",
                str(found),
                "--picture",
                str(tmp_path / "found.svg"),
            ]
        )
        == 2
    )
    assert "error: picture: found no matplotlib, expected it for pictures; pip install" in capsys.readouterr().err
    assert not found.exists()


def test_every_checkpoint_once_and_as_curves(run, capsys, tmp_path):
    each = {step: evaluated(run, str(run / "run"), "--step", str(step)) for step in (2, 4, 6)}
    assert evaluated(run, str(run / "run")) == each[6]
    assert evaluated(run, str(run / "run" / "checkpoints" / "step-00000004")) == each[4]
    assert each[6]["phenomena"] == each[6]["paradigms"] == {"cycle": each[6]["mean_of_paradigms"]}
    shutil.rmtree(run / "run" / "evaluate-blimp", ignore_errors=True)
    arguments = ["evaluate", str(run / "run"), "--data", str(run / "pairs"), "--every_checkpoint", "true"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2", "4", "6"]
    assert main(arguments) == 0 and capsys.readouterr().out == "", "what has a result is not measured again"
    result = run / "run" / "evaluate-blimp" / "step-00000004.json"
    saved = json.loads(result.read_bytes())
    for content in (
        *(None, b"", result.read_bytes()[:40], b"[]", b"[" * 100_000),
        *(
            json.dumps(saved | change).encode()
            for change in ({"step": 6}, {"step": "x"}, {"result": 3}, {"result": {}})
        ),
        *(
            json.dumps(saved | {"result": saved["result"] | change}).encode()
            for change in (
                {"mean_of_phenomena": float("nan")},
                {"mean_of_paradigms": 150.0},
                {"paradigms": {"cycle": "x"}},
                {"phenomena": None},
                {"log_likelihood_per_character": -1.0},
            )
        ),
    ):
        result.unlink()
        if content is not None:
            result.write_bytes(content)
        assert main(arguments) == 0 and capsys.readouterr().out.startswith("step 4 "), content
    checksums = run / "run" / "checkpoints" / "step-00000004" / "checksums.json"
    listed = checksums.read_text()
    checksums.write_text(listed + "\n")  # as of another checkpoint of this step
    assert main(arguments) == 0 and capsys.readouterr().out.startswith("step 4 ")
    checksums.write_text(listed)
    assert main(arguments) == 0 and capsys.readouterr().out.startswith("step 4 ")
    moved = shutil.copytree(run / "pairs", tmp_path / "pairs")
    arguments[3] = str(moved)
    assert main(arguments) == 0 and capsys.readouterr().out == "", "the same data, elsewhere"
    board = EventAccumulator(str(run / "run" / "evaluate-blimp")).Reload()
    curve = [(event.step, event.value) for event in board.Scalars("blimp/mean_of_phenomena")]
    assert curve == [(step, pytest.approx(result["mean_of_phenomena"])) for step, result in each.items()]
    (path,) = moved.glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert main(arguments) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2", "4", "6"], "other data"
    shutil.rmtree(run / "run" / "evaluate-blimp")


def test_a_run_goes_on_beside_its_results(run, capsys):
    """A folder evaluate-SUITE in a run is nothing that a resume would refuse."""
    (run / "run" / "evaluate-blimp").mkdir(exist_ok=True)
    shutil.copytree(run / "run", run / "again")
    output = train(run / "data", run / "again", *FALLING)
    assert "another run" not in output


def test_the_mean_of_the_last_checkpoints(run, tmp_path, capsys):
    assert main(["export", str(run / "run"), "--output", str(tmp_path / "hf"), "--average", "2"]) == 0
    assert "the mean of steps 4, 6 of" in capsys.readouterr().out
    names = {"bert.embeddings.word_embeddings.weight": "bert.embeddings.word.weight"}
    exported, parts = load_file(tmp_path / "hf" / "model.safetensors"), [weights(run / "run", step) for step in (4, 6)]
    for theirs, ours in names.items():
        expected = (parts[0][ours].double() + parts[1][ours].double()) / 2
        vocabulary = exported[theirs].shape[0]  # our rows are padded
        assert torch.equal(exported[theirs], expected.float()[:vocabulary])
    assert Predictor.from_folder(tmp_path / "hf").score("w1 w2").log_probability < 0
    other = shutil.copytree(run / "run", tmp_path / "other")
    rewrite(
        other / "checkpoints" / "step-00000004" / MODEL_FILE,
        lambda content: content["module"].pop("bert.pooler.dense.bias"),
    )
    assert main(["export", str(other), "--output", str(tmp_path / "more"), "--average", "2"]) == 2
    assert "found other weights in the checkpoint of step 4 than in that of step 6" in capsys.readouterr().err
    assert main(["export", str(run / "run"), "--output", str(tmp_path / "more"), "--average", "4"]) == 2
    assert "found 3 checkpoints up to step 6, expected the 4" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "hf"), "--output", str(tmp_path / "more"), "--average", "2"]) == 2
    assert "average: found 2 with" in capsys.readouterr().err


def test_a_masking_rate_needs_masks_that_are_not_drawn_yet(run, tmp_path, capsys):
    data = make_shards(tmp_path / "data")
    output = train(data, tmp_path / "run", "--train.max_steps", "2", "--masking.rate", "0.5", status=2)
    assert "masking.rate: found 0.5 with shards" in output
    sections = ["pretrain", "--data", str(data), "--output", str(tmp_path / "run")]
    for arguments, message in (
        (["--masking.final_rate", "0.1"], "masking.final_rate: found 0.1 without masking.rate"),
        (["--masking.rate", "1.5"], "masking.rate: found 1.5, expected above 0, up to 1"),
        (
            ["--masking.rate", "0.3", "--masking.final_rate", "0.1", "--train.time_budget_hours", "1"],
            "how many samples it has is not known",
        ),
    ):
        assert main([*sections, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_what_cannot_be_measured_is_said_in_one_line(model, run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jsonl").write_text('{"sentence_good": "the cat"}\n')
    (tmp_path / "[broken]").symlink_to("broken")
    for arguments, message in (
        ([str(model), "--suite", "blimp"], "data: found none"),
        ([str(model), "--data", str(tmp_path / "empty")], "data: found no *.jsonl file in"),
        ([str(model), "--data", str(tmp_path / "broken")], "a.jsonl:1: found no pair (KeyError: 'sentence_bad')"),
        ([str(model), "--suite", "lines", "--data", str(tmp_path / "none")], "error: data: found nothing at"),
        ([str(model), "--data", str(run / "pairs"), "--step", "3"], "step: found 3 with"),
        ([str(run / "run"), "--data", str(run / "pairs"), "--step", "3"], "no good checkpoint of step 3"),
        ([str(model), "--data", str(run / "pairs"), "--every_checkpoint", "true"], "which is no run of pretraining"),
        ([str(model), "--data", str(run / "pairs"), "--random_weights", "true"], "random_weights: found true with"),
        (
            [str(model), "--data", str(run / "pairs"), "--output", "x"],
            "output: found x with suite blimp, expected none",
        ),
        ([str(model), "--suite", "lines", "--data", "x", "--seeds", "9"], "seeds: found 9 with suite lines"),
        (["m", "--suite", "glue", "--data", "x", "--every_nth", "2"], "every_nth: found 2 with suite glue"),
        (
            [str(model), "--data", str(tmp_path / "[broken]"), "--json", str(tmp_path / "[broken]" / "a.jsonl")],
            "a.jsonl, the file of the texts, which it would replace",
        ),
        (
            ["m", "--suite", "lines", "--data", str(tmp_path / "*/a.*"), "--json", str(tmp_path / "broken/a.jsonl")],
            "a.jsonl, the file of the texts, which it would replace",
        ),
        (
            [
                "m",
                "--suite",
                "lines",
                "--data",
                str(tmp_path / "broken"),
                "--json",
                str(tmp_path / "empty/../broken/new"),
            ],
            "/new in the folder of the texts, whose next evaluation would read it as one",
        ),
        (  # what is in the folders of tasks and is no table may be replaced
            ["m", "--suite", "glue", "--data", str(tmp_path), "--json", str(tmp_path / "broken/a.jsonl")],
            "output: found none with suite glue",
        ),
    ):
        assert main(["evaluate", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
