"""The card of an exported model."""

import json

import pytest
import yaml

from cloze.launch.tools.card import _measured, _training, _without_paths
from cloze.pipeline.errors import UserError


def test_a_card_names_no_folder_of_options_that_are_not_ours():
    assert _without_paths({"teacher": "/home/me/teacher", "soft": 5.0, "more": ["a/b", "word"]}) == {
        "teacher": None,
        "soft": 5.0,
        "more": [None, "word"],
    }


def test_a_card_has_no_folder_of_the_run(tmp_path):
    recipe = {"output": "/data/me/run", "checkpoint": {"scratch": "/nvme/me", "keep_last": 2}, "seed": 42}
    recipe["evaluation"] = {"metric": "loss/news"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    found = yaml.safe_load(_training(tmp_path).partition("```yaml")[2].partition("```")[0])
    assert found == {"checkpoint": {"keep_last": 2}, "seed": 42, "evaluation": {"metric": "loss/news"}}


@pytest.mark.parametrize(
    "changed", [{"evaluation": None}, {"data": {}}, {"data": {"sources": [3]}}, {"data": {"sources": [{"x": 1}]}}]
)
def test_sections_that_no_run_has_are_a_line(tmp_path, changed):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"evaluation": {}} | changed))
    with pytest.raises(UserError, match="config.yaml: found sections that no run has"):
        _training(tmp_path)


def test_figures_that_are_no_numbers_are_left_out(tmp_path):
    values = {"examples": 3, "accuracy": 0.5, "f1": [1], "loss": float("nan"), "bits": "x"}
    (tmp_path / "results.json").write_text(json.dumps({"validation": values}))
    assert _measured(tmp_path).splitlines()[2:] == ["| validation | accuracy | 0.5000 |"]
