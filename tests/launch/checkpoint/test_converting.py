"""A checkpoint's form for another number of processes: that of DeepSpeed's own converter, each file read once."""

import json
import math
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.tensor_fragment import fragment_address
from torch.utils.serialization import config as serialization

from cloze.launch.checkpoint import converting
from cloze.launch.checkpoint.converting import convert_to_universal
from cloze.launch.checkpoint.deepspeed_files import MODEL_FILE
from cloze.launch.engine.content import OtherContent

SHAPES = [{"words": (31, 8), "layer.weight": (16, 8)}, {"layer.bias": (8,), "norm.weight": (5,)}]  # of two groups
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def whole_tensors() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return {key: {name: torch.randn(shape) for group in SHAPES for name, shape in group.items()} for key in KEYS}


def save(folder: Path, stage: int, ranks: int, models: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    """A checkpoint of so many ranks, as DeepSpeed would write it; returns the whole tensors.

    Args:
        models: number of ranks whose file of the model is there, of which the conversion reads the first.
    """
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"zero_stage": stage, "world_size": ranks}))
    whole = whole_tensors()
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES]
    model = {"param_shapes": shapes, "module": whole["fp32"], "ds_config": {}, "ds_version": "0"}
    if stage < 3:
        torch.save(model, folder / MODEL_FILE)
    for rank in range(ranks):
        if stage == 3 and rank < models:
            torch.save(model, folder / f"zero_pp_rank_{rank}_{MODEL_FILE}")
        content = (_of_stage_3 if stage == 3 else _of_stage_2)(whole, rank, ranks)
        content |= {"zero_stage": stage, "loss_scaler": 1.0, "partition_count": [ranks] * len(SHAPES)}
        torch.save({"optimizer_state_dict": content}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return whole


def _states(flats: list[dict[str, torch.Tensor]]) -> dict:
    states = {
        number: {"step": torch.tensor(7.0), **{key: flat[key] for key in KEYS[1:]}} for number, flat in enumerate(flats)
    }
    return {"state": states, "param_groups": [{"lr": 0.1, "params": [number]} for number in states]}


def _of_stage_2(whole, rank: int, ranks: int) -> dict:
    """A part of each flat group, and which part of it is which parameter's."""
    flats, addresses = [], []
    for group in SHAPES:
        size = math.ceil(sum(math.prod(shape) for shape in group.values()) / ranks)
        flats.append({})
        for key in KEYS:
            flat = torch.cat([whole[key][name].flatten() for name in group])
            flat = torch.cat([flat, torch.zeros(size * ranks - len(flat))])
            flats[-1][key] = flat[rank * size : (rank + 1) * size].clone()
            if key != "fp32":  # which have nothing for what pads the group
                flats[-1][key] = flats[-1][key][: max(0, sum(map(math.prod, group.values())) - rank * size)]
        begin, found = 0, {}
        for name, shape in group.items():
            start, end = max(begin, rank * size), min(begin + math.prod(shape), (rank + 1) * size)
            if start < end:
                found[name] = fragment_address(numel=end - start, start=start - rank * size)
            begin += math.prod(shape)
        addresses.append(found)
    return {
        "base_optimizer_state": _states(flats),
        "single_partition_of_fp32_groups": [flat["fp32"] for flat in flats],
        "param_slice_mappings": addresses,
        "group_paddings": [0] * len(SHAPES),
    }


def _of_stage_3(whole, rank: int, ranks: int) -> dict:
    """A part of each parameter, the last ones with padding."""
    flats = []
    for group in SHAPES:
        flats.append({})
        for key in KEYS:
            parts = []
            for name in group:
                flat = whole[key][name].flatten()
                size = math.ceil(len(flat) / ranks)
                flat = torch.cat([flat, torch.zeros(size * ranks - len(flat))])
                parts.append(flat[rank * size : (rank + 1) * size])
            flats[-1][key] = torch.cat(parts)
    return {"optimizer_state_dict": _states(flats), "fp32_flat_groups": [flat["fp32"] for flat in flats]}


def converted(folder: Path) -> dict[str, torch.Tensor | float]:
    """Each file of the parameters by its path, flat."""
    found = {str(path.relative_to(folder)): torch.load(path) for path in sorted((folder / "zero").rglob("*/*.pt"))}
    plain = {name: each["param"] if isinstance(each, dict) else each for name, each in found.items()}
    return {name: each.flatten().tolist() for name, each in plain.items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_it_is_what_deepspeeds_own_converter_writes(tmp_path, stage):
    whole = save(tmp_path / "step", stage, ranks=3, models=3)
    convert_to_universal(tmp_path / "step", tmp_path / "ours", 1)
    ds_to_universal.main(
        Namespace(
            input_folder=str(tmp_path / "step"),
            output_folder=str(tmp_path / "theirs"),
            keep_temp_folder=False,
            strict=True,
            num_extract_workers=1,
            num_merge_workers=1,
            inject_missing_state=stage < 3,
        )
    )
    ours, theirs = converted(tmp_path / "ours"), converted(tmp_path / "theirs")
    assert ours == theirs and len(ours) == (16 if stage == 2 else 12)
    assert ours["zero/words/exp_avg.pt"] == whole["exp_avg"]["words"].flatten().tolist()
    common, expected = (torch.load(tmp_path / name / "zero/optimizer_state.pt") for name in ("ours", "theirs"))
    assert (
        common["loss_scaler"] == expected["loss_scaler"] == 1.0 and common["param_groups"] == expected["param_groups"]
    )
    if stage == 3:
        assert common["optimizer_state_dict"]["state"][0]["step"] == 7.0
    model = MODEL_FILE if stage == 2 else f"zero_pp_rank_0_{MODEL_FILE}"  # which all ranks read
    assert torch.equal(torch.load(tmp_path / "ours" / model)["module"]["words"], whole["fp32"]["words"])


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_thousand_ranks_cost_one_reading_of_each_file_and_no_more_files(tmp_path, monkeypatch, stage):
    """What is written does not grow with the ranks: the parts of a tensor were a file each, which was read again."""
    opened, written, sizes = [], [], {}
    load, store = converting.load_own, torch.save
    monkeypatch.setattr(converting, "load_own", lambda path, **how: (opened.append(path), load(path, **how))[1])
    for ranks in (2, 1024):
        folder = tmp_path / f"{ranks}"
        whole = save(folder / "step", stage, ranks)
        opened.clear(), written.clear()
        monkeypatch.setattr(torch, "save", lambda value, path: (written.append(path), store(value, path))[1])
        convert_to_universal(folder / "step", folder / "ours", 1024)
        monkeypatch.setattr(torch, "save", store)
        assert len(opened) == len(set(opened)) == ranks + 1
        assert len(written) == len(set(written)) == (17 if stage == 2 else 13)
        sizes[ranks] = sum(path.stat().st_size for path in (folder / "ours").rglob("*.pt"))
        for key, name in ((key, name) for group in SHAPES for name in group for key in KEYS):
            flat = torch.load(folder / f"ours/zero/{name}/{key}.pt")
            flat = flat if stage == 3 else flat["param"]
            values = whole[key][name].flatten()
            assert torch.equal(flat[: len(values)], values) and not flat[len(values) :].any()
            assert len(flat) % 1024 == 0 if stage == 3 else len(flat) == len(values), "else each rank would read all"
    assert sizes[1024] == pytest.approx(sizes[2], rel=0.01)


def test_files_are_read_and_written_side_by_side_and_their_values_once(tmp_path, monkeypatch):
    """Threads take them; values stay in the files until a whole tensor is written."""
    save(tmp_path / "step", 2, ranks=4)
    mapped, names, load = [], set(), torch.load

    class Counting(ThreadPoolExecutor):
        def map(self, work, items):
            items = list(items)
            names.add(len(items))
            return super().map(work, items)

    monkeypatch.setattr(converting, "ThreadPoolExecutor", Counting)
    monkeypatch.setattr(torch, "load", lambda path, **how: (mapped.append(how["mmap"]), load(path, **how))[1])
    convert_to_universal(tmp_path / "step", tmp_path / "ours", 1)
    assert mapped == [True] * 5 and names == {4}, "four ranks, four parameters"


def test_a_process_reads_its_part_of_a_whole_tensor_alone(tmp_path):
    """As the files of a conversion are loaded: mapped, of 16 MB only the pages that are looked at."""
    torch.save({"param": torch.ones(1 << 22)}, tmp_path / "fp32.pt")
    with serialization.patch("load.mmap", True):
        part = torch.load(tmp_path / "fp32.pt")["param"].narrow(0, 1 << 21, 1 << 10).clone()
    assert part.sum() == 1 << 10
    maps = Path("/proc/self/smaps").read_text()
    assert "fp32.pt" not in maps, "and nothing of it stays"


def test_a_file_of_something_else_is_named(tmp_path):
    save(tmp_path / "step", 2, ranks=2)
    path = tmp_path / "step/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path)
    content["optimizer_state_dict"]["param_slice_mappings"][0]["words"] = fragment_address(numel=1 << 40, start=0)
    torch.save(content, path)
    with pytest.raises(OtherContent, match="zero_pp_rank_1_mp_rank_00_optim_states.pt: the size of words is 1099"):
        convert_to_universal(tmp_path / "step", tmp_path / "ours", 1)
