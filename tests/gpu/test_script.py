"""benchmarks/gpu.py without a GPU: what it runs on one is there, and its file is written whatever happens."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.fake_cuda import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_its_parts_exist_and_end_within_eight_minutes(script):
    assert sum(seconds for seconds, _ in script.PARTS.values()) <= 8 * 60
    for _, command in script.PARTS.values():
        (file,) = [each for each in command if each.endswith(".py")]
        assert (ROOT / file).is_file()


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "gpu.json")])
    assert script.main() == 2 and "found no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_the_file_holds_the_device_and_each_part_also_of_one_that_fails_or_takes_too_long(
    script, monkeypatch, tmp_path
):
    """The first command writes figures where it is told to; the last one has started a process of its own."""
    sheet = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sheet)
    write = "import pathlib, sys; print('measured'); pathlib.Path(sys.argv[1]).write_text('{\"mfu\": 0.5}')"
    sleep = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    monkeypatch.setattr(
        script,
        "PARTS",
        {
            "figures": (30, ["-c", write, "FIGURES"]),
            "failing": (30, ["-c", "raise SystemExit(3)"]),
            "late": (1, ["-c", sleep]),
        },
    )
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "gpu.json")])
    assert script.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["device"]["name"] == sheet.name and found["device"]["capability"] == "9.0"
    assert found["figures"]["figures"] == {"mfu": 0.5} and found["figures"]["output"] == "measured\n"
    assert [found[name]["status"] for name in ("figures", "failing", "late")] == [0, 3, None]
    assert found["late"]["seconds"] < 20
