"""Fine-tuning into a store: killed and gone on with from empty disks, the model predicted with from the URL."""

from __future__ import annotations

import json

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.pretrain.shapes import local_description
from cloze.launch.run import runs
from cloze.model.config_files import read_shape
from cloze.pipeline.stores.places import to_place
from tests.launch.finetune.running import arguments, finetune
from tests.launch.finetune.small import make_model, sst2
from tests.launching import finish, kill_all
from tests.stores.stored_runs import (
    Machine,
    assert_nothing_but_what_counts,
    begin_on,
    committed,
    finish_all,
    keys,
    wait_until,
)

OPTIONS = "--epochs", 2, "--checkpoint.every_steps", 4, "--zero.stage", 1


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Model, training and validation files."""
    folder = tmp_path_factory.mktemp("task")
    return make_model(folder / "model"), *sst2(folder)


def test_killed_on_two_machines_and_gone_on_with(task, bucket, tmp_path, capsys):
    """The best checkpoint, of which each machine had its part, is whole on both in the end: they predict with it."""
    output = f"{bucket}/tuned"
    command = arguments("sst2", *task, output, *OPTIONS)
    processes = begin_on([Machine(tmp_path / "a"), Machine(tmp_path / "b")], command, step_seconds=0.1)
    try:
        wait_until(lambda: bool(committed(output)), processes[0])
    finally:
        for process in processes:
            kill_all(process)
            finish(process, None)
    assert main(["predict", "classify", output, "a great w1"]) == 2
    assert f"{output}: found a run of `cloze finetune` without its model" in capsys.readouterr().err
    printed = finish_all(begin_on([Machine(tmp_path / "c"), Machine(tmp_path / "d")], command))
    assert "resumed from step" in printed and f"model     {output}/model\n" in printed
    assert_nothing_but_what_counts(output)
    expected, _ = finetune("sst2", *task, tmp_path / "local", *OPTIONS, processes=2)
    place = to_place(output)
    assert json.loads((place / "results.json").read_bytes()) == expected
    made = {
        str(path.relative_to(tmp_path / "local")): path.read_bytes()
        for name in ("model", "predictions")
        for path in (tmp_path / "local" / name).rglob("*")
        if path.is_file()
    }
    assert {
        key: (place / key).read_bytes() for key in keys(output) if key.startswith(("model/", "predictions/"))
    } == made
    assert f"output: {output}\n" in (place / "config.yaml").read_text()
    capsys.readouterr()
    texts = ["a great w1", "w3 dull"]
    for where in (output, str(tmp_path / "local")):
        assert main(["predict", "classify", where, *texts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[:2] == lines[2:]
    assert main(["status", output]) == 0
    assert "complete" in capsys.readouterr().out
    # A pretraining goes on from it, and finds what it began with again.
    shape = parse("pretrain", ["--data", "d", "--output", "o", "--init_from", output]).model
    assert shape.hidden_size == read_shape(task[0]).hidden_size
    described = runs.model_folder(local_description(output))
    names = {path.name for path in (tmp_path / "local/model").iterdir()}
    assert {path.name for path in described.iterdir()} == names - {"model.safetensors"}
