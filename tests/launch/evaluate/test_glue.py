"""GLUE with several seeds, from pretrained and from random weights."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

from cloze.launch.cli import main
from cloze.launch.evaluate.config import EvaluateConfig
from cloze.launch.evaluate.glue import fine_tune
from cloze.launch.run.run_locks import locked
from cloze.launch.run.runs import LOCK
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError
from tests.commands import forked_cloze
from tests.launch.tiny_models import save_model

TEXTS = ["the man went to the store", "a cat sat on the mat .", "who ate an apple ?", "the sky is blue"] * 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "grid: ['learning_rate=1e-4,3e-3']",
            "found grid learning_rate=1e-4,3e-3 in .*, expected none: means",
        ),
        (
            "evaluation: {metric: loss}",
            "found evaluation.metric loss in .*, expected auto: sst2 is measured by acc",
        ),
    ],
)
def test_a_configuration_that_other_values_come_of_is_refused_before_any_run(tmp_path, content, said):
    """Settings of a grid were averaged as if they were seeds."""
    path = tmp_path / "own.yaml"
    path.write_text(content)
    tasks = {"sst2": (tmp_path / "train.tsv", tmp_path / "dev.tsv")}
    config = EvaluateConfig("m", "glue", "x", output=str(tmp_path / "runs"), finetune_config=str(path))
    with pytest.raises(UserError, match=f"finetune_config: {said}"):
        fine_tune(save_model(tmp_path / "hf"), None, tasks, config, Console())
    assert not (tmp_path / "runs").exists()


def test_nothing_is_written_into_what_another_job_has(tmp_path):
    """The shape of random weights was, which that job's runs would have read."""
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(f"{text}\t1\n" for text in TEXTS))
    tasks = {"sst2": (tmp_path / "train.tsv", tmp_path / "dev.tsv")}
    config = EvaluateConfig("m", "glue", "x", output=str(tmp_path / "runs"), random_weights=True)
    with locked(tmp_path / "runs"), pytest.raises(UserError, match="in use by another job"):
        fine_tune(save_model(tmp_path / "hf"), None, tasks, config, Console())
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [LOCK]


@pytest.mark.slow
def test_fine_tuning_with_seeds(tmp_path, capsys, monkeypatch):
    model = save_model(tmp_path / "hf")
    rows = [(text, number % 2) for number, text in enumerate(TEXTS)]
    for name in ("train", "dev"):
        (tmp_path / "tasks" / "SST-2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tasks" / "SST-2" / f"{name}.tsv").write_text(
            "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
        )
    short = tmp_path / "short.yaml"
    short.write_text(
        "epochs: 1\nevaluation: {every_steps: 0}\nmax_length: 32\n"
        "train: {global_batch_size: 8, micro_batch_size: 8, precision: fp32}\n"
    )
    arguments = [
        "evaluate",
        str(model),
        "--suite",
        "glue",
        "--data",
        str(tmp_path / "tasks"),
        "--seeds",
        "2",
        "--random_weights",
        "true",
        "--output",
        str(tmp_path / "runs"),
        "--finetune_config",
        str(short),
        "--json",
        str(tmp_path / "found.json"),
    ]
    with forked_cloze(tmp_path / "programs") as program:
        monkeypatch.setattr(sys, "executable", str(program))
        assert main(arguments) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    for start, folder in (("tasks", tmp_path / "runs"), ("random_weights", tmp_path / "runs" / "random-weights")):
        result, own = (
            found[start]["sst2"],
            {seed: json.loads((folder / "sst2" / f"seed-{seed}" / "results.json").read_text()) for seed in ("1", "2")},
        )
        assert result["seeds"] == {seed: each["validation"]["accuracy"] for seed, each in own.items()}
        assert result["metric"] == "accuracy" and result["mean"] == pytest.approx(sum(result["seeds"].values()) / 2)
        for seed, each in own.items():
            assert each["majority"]["accuracy"] == result["majority"] >= 0.5
            said = (folder / "sst2" / f"seed-{seed}.log").read_text()
            assert ("that of always giving the most frequent" in said) == (result["seeds"][seed] <= result["majority"])
    said = [
        re.sub(r"\s+", " ", (tmp_path / "runs" / part / "sst2" / "seed-1.log").read_text())
        for part in ("", "random-weights")
    ]
    assert "weights │ random" in said[1] and "weights │ random" not in said[0]
    with locked(tmp_path / "runs"):
        assert main(arguments) == 2 and "in use by another job" in capsys.readouterr().err
    assert main(arguments) == 0
    printed = capsys.readouterr()
    worst = found["tasks"]["sst2"]
    assert ("warning: sst2/accuracy" in printed.err) == (worst["median"] <= worst["majority"])
    said = re.sub(r"\s+", " ", printed.out)
    assert "4 of 4 runs are complete already" in said and "random weights: median" in said
    # What lies there of another model, configuration or file was once taken for this one's result.
    (tmp_path / "long.yaml").write_text(short.read_text().replace("epochs: 1", "epochs: 2", 1))
    others = {str(model): save_model(tmp_path / "other", seed=5), str(short): tmp_path / "long.yaml"}
    for before, other in others.items():
        assert main([str(other) if word == before else word for word in arguments]) == 2
        assert "with another run, whose" in capsys.readouterr().err
    (tmp_path / "tasks" / "RTE").mkdir()
    assert main(arguments) == 0
    assert f"warning: {tmp_path / 'tasks' / 'RTE'}: found no train.tsv with dev.tsv" in capsys.readouterr().err
    shutil.copytree(tmp_path / "tasks" / "SST-2", tmp_path / "tasks" / "sst2")
    assert main(arguments) == 2 and "expected one folder of sst2" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "tasks" / "sst2")
    shutil.move(model, tmp_path / "first")
    shutil.copytree(tmp_path / "other", model)
    assert main(arguments) == 2 and "with another run, whose model_hash" in capsys.readouterr().err, "at the same path"
    shutil.rmtree(model)
    shutil.move(tmp_path / "first", model)
    written = tmp_path / "runs/random-weights/shape.yaml"
    for content in ("{x", "[1]"):
        before = written.read_text()
        written.write_text(content)
        assert main(arguments) == 2 and f"error: {written}: found " in capsys.readouterr().err
        written.write_text(before)
    results = tmp_path / "runs/sst2/seed-1/results.json"
    for change in ({"metric": "f1"}, {"validation": {"loss": 1.0}}, {"validation": {"loss": 1.0, "accuracy": 75.0}}):
        before = results.read_text()
        results.write_text(json.dumps(json.loads(before) | change))
        assert main(arguments) == 2 and "results.json: found no accuracy of the validation" in capsys.readouterr().err
        results.write_text(before)
    smaller = save_model(tmp_path / "smaller", num_hidden_layers=2)
    assert main([str(smaller) if word == str(model) else word for word in arguments]) == 2
    assert "shape.yaml of another model" in capsys.readouterr().err
    development = tmp_path / "tasks" / "SST-2" / "dev.tsv"
    development.write_text(development.read_text().replace("\t1\n", "\t0\n"))
    assert main(arguments) == 2 and "with another run, whose" in capsys.readouterr().err
    development.unlink()
    assert main(arguments) == 2 and "found no task of GLUE" in capsys.readouterr().err
