"""Pickled files of checkpoints are read as weights and few classes of DeepSpeed only."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from cloze.launch.checkpoint.deepspeed_files import (
    ALLOWED_CLASSES,
    MODEL_FILE,
    known_content,
    load_own,
    load_pickled,
    whole_weights,
    written_by,
)
from cloze.launch.checkpoint.weight_averages import average_content, average_file, whole_average
from cloze.launch.engine.content import OtherContent
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


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_file_that_was_cut_is_damaged_wherever_it_ends(tmp_path, in_memory):
    """Some ends lead the reader to a place before the beginning, which is an error of the system."""
    torch.save({"weight": torch.zeros(2000), "step": 3}, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    for size in range(0, len(content), 41):
        (tmp_path / "cut.pt").write_bytes(content[:size])
        with pytest.raises(UserError, match=r"cut.pt: found .*damaged file, expected a checkpoint; it was not loaded"):
            load_pickled(tmp_path / "cut.pt", in_memory=in_memory)


def test_compressed_tensors_are_refused(tmp_path):
    """A small file of them could take all memory."""
    torch.save({"weight": torch.zeros(10_000)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for record in stored.namelist():
            bomb.writestr(record, stored.read(record))
    assert (tmp_path / "bomb.pt").stat().st_size < 3000 and len(
        load_pickled(tmp_path / "stored.pt")["weight"]
    ) == 10_000
    with pytest.raises(UserError, match="bomb.pt: found compressed tensors"):
        load_pickled(tmp_path / "bomb.pt")
    buffer = io.BytesIO((tmp_path / "stored.pt").read_bytes())
    assert len(load_pickled(buffer)["weight"]) == 10_000


def test_names_that_are_no_texts_are_other_content(tmp_path):
    (tmp_path / "state.json").write_text('{"zero_stage": 0}')
    torch.save({"module": {"weight": torch.ones(3), 3: torch.ones(3)}}, tmp_path / MODEL_FILE)
    with pytest.raises(UserError, match="found other content.*a tensor whose name is no text"), known_content(tmp_path):
        whole_weights(tmp_path)


def test_a_file_of_another_process_is_other_content(tmp_path):
    """Of the same checkpoint: two processes' parts of the states may have the same shapes."""
    (tmp_path / "state.json").write_text('{"step": 4, "run": "r"}')
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    torch.save({"weight": torch.ones(3)} | written_by(4, "r", names[0]), tmp_path / names[0])
    assert load_own(tmp_path / names[0])["weight"].tolist() == [1, 1, 1]
    (tmp_path / names[1]).write_bytes((tmp_path / names[0]).read_bytes())
    with pytest.raises(UserError, match=f"{names[1]}: it was written as '{names[0]}'"):
        load_own(tmp_path / names[1])


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"weight": (0, torch.ones(3))}, "the averages of 3 weights of weight, expected those of all 4"),
        ({"bias": (0, torch.ones(2))}, "the averages of 0 weights of weight, expected those of all 4"),
        ({"weight": (0, torch.ones(4)), "bias": (1, torch.ones(1))}, "0 weights of bias, expected those of all 2"),
        ({"weight": (2, torch.ones(4)), "bias": (0, torch.ones(2))}, "the averages of 6 weights of weight, expected"),
        ({"weight": (0, torch.ones(4)), "other": (0, torch.ones(4))}, "the averages of 4 weights of other, expected"),
        ({"weight": (0, torch.ones(2, 2)), "bias": (0, torch.ones(2))}, "the part of weight is a tensor of float32"),
        ({"weight": (True, torch.ones(4))}, "the offset of weight is True, expected a whole number"),
    ],
)
def test_an_average_of_some_of_the_weights_is_refused(tmp_path, parts, found):
    """The others, of the same tensor or of another, would go out as they are."""
    (tmp_path / "state.json").write_text('{"zero_stage": 0}')
    weights = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "again": torch.zeros(2, 2), "still": torch.zeros(9)}
    of_all = {"weight": (0, torch.ones(4)), "bias": (0, torch.ones(2))}
    for each in (of_all, parts):
        content = average_content(each, tied={"again": "weight"}, frozen=["still"])
        torch.save(content, tmp_path / average_file(None))
        if each is of_all:
            averaged = whole_average(tmp_path, weights)
            assert {name: tensor.sum() for name, tensor in averaged.items()} == {
                "weight": 4,
                "bias": 2,
                "again": 4,
                "still": 0,
            }
            torch.save(content | {"frozen": []}, tmp_path / average_file(None))
            with pytest.raises(OtherContent, match="0 weights of still, expected those of all 9"):
                whole_average(tmp_path, weights)
            continue
        with pytest.raises(OtherContent, match=found):
            whole_average(tmp_path, weights)
