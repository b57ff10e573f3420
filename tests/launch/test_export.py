"""What `cloze export` says about the folder that it has written."""

import json

import pytest

from launch.cli import main
from tests.launch.tiny_models import save_model


def test_the_folder_in_which_one_stands(tmp_path, capsys, monkeypatch):
    save_model(tmp_path / "run" / "model")
    monkeypatch.chdir(tmp_path / "run")
    assert main(["export", "."]) == 0
    assert (tmp_path / "run-hf" / "model.safetensors").is_file()
    assert f"exported model to {tmp_path / 'run-hf'}" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["bert", "cloze"])
def test_a_shape_that_transformers_lacks_is_named(tmp_path, capsys, model_type):
    save_model(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    assert main(["export", str(tmp_path / "model")]) == 0
    assert ("in its own format, which only Cloze reads" in capsys.readouterr().err) == (model_type == "cloze")
