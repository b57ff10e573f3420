"""Pickled files of checkpoints are read as weights and few classes of DeepSpeed only."""

from pathlib import Path

import pytest
import torch

from cloze.launch.checkpoint import ALLOWED_CLASSES, load_pickled
from cloze.launch.checkpoint.deepspeed_files import MODEL_FILE, known_content, whole_weights
from cloze.launch.checkpoint.weight_averages import average_content, average_file, whole_average
from cloze.pipeline.errors import UserError


def test_only_deepspeeds_own_classes_are_allowed(tmp_path):
    assert {kind.__name__ for kind in ALLOWED_CLASSES} == {
        "LossScaler",
        "DynamicLossScaler",
        "fragment_address",
        "ZeroStageEnum",
    }
    torch.save({"path": Path("x")}, tmp_path / "file.pt")
    with pytest.raises(UserError, match="other than tensors"):
        load_pickled(tmp_path / "file.pt")


def test_names_that_are_no_texts_are_other_content(tmp_path):
    (tmp_path / "state.json").write_text('{"zero_stage": 0}')
    torch.save({"module": {"weight": torch.ones(3), 3: torch.ones(3)}}, tmp_path / MODEL_FILE)
    with pytest.raises(UserError, match="found a tensor whose name is no text"), known_content(tmp_path):
        whole_weights(tmp_path)


def test_an_average_of_some_of_a_tensors_weights_is_refused(tmp_path):
    """The others would go out as they are."""
    (tmp_path / "state.json").write_text('{"zero_stage": 0}')
    for part in (torch.ones(3), torch.ones(4)):
        torch.save(average_content({"weight": (0, part)}, {}), tmp_path / average_file(None))
        if len(part) == 4:
            assert whole_average(tmp_path, {"weight": torch.zeros(2, 2)})["weight"].equal(torch.ones(2, 2))
            continue
        with pytest.raises(UserError, match="the averages of 3 weights of weight, expected those of all 4"):
            whole_average(tmp_path, {"weight": torch.zeros(2, 2)})
