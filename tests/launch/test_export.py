"""What `cloze export` says about the folder that it has written."""

import json

import pytest

from launch.cli import main
from tests.launch.tiny_models import save_model


@pytest.mark.parametrize("model_type", ["bert", "cloze"])
def test_a_shape_that_transformers_lacks_is_named(tmp_path, capsys, model_type):
    save_model(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    assert main(["export", str(tmp_path / "model")]) == 0
    assert ("a format that only Cloze reads" in capsys.readouterr().err) == (model_type == "cloze")
