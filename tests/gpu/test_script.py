"""benchmarks/gpu.py without a GPU: what it runs on one is there, and its report is written whatever happens."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.fake_cuda import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    return gpu


@pytest.fixture
def h100(monkeypatch):
    """One in name only."""
    sheet = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sheet)


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    """Calls the script with further arguments; returns its status and its report."""

    def call(*arguments: str) -> tuple[int, dict, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "report"), *arguments])
        status, folder = script.main(), tmp_path / "report"
        if not folder.exists():
            return status, {}, ""
        return status, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    return call


def test_its_parts_exist_and_end_in_time(script):
    parts = script.PARTS.values()
    assert sum(part.seconds for part in parts) <= 60 * script.MINUTES
    assert sum(part.quick or 0 for part in parts) <= 60 * script.QUICK_MINUTES
    for part in parts:
        for command in filter(None, (part.command, part.quick_command, part.rehearsal)):
            for file in command:
                assert not file.endswith(".py") or (ROOT / file).is_file(), file


def test_its_claims_are_in_the_docs_and_name_tests_that_there_are(script):
    assert script.table() in (ROOT / "docs" / "scaling.md").read_text()
    tree = ast.parse((ROOT / "tests" / "model" / "test_cuda.py").read_text())
    tests = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    for claim in script.CLAIMS:
        assert (ROOT / "docs" / claim.page).is_file()
        for name in claim.bound.split("`")[1::2]:
            assert name in tests
    import planned_and_measured

    assert set(script.SHAPES) < set(planned_and_measured.SHAPES)


def test_without_a_gpu_it_says_so(run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run() == (2, {}, "") and "found no CUDA device" in capsys.readouterr().err


MEASURES = "import pathlib, sys; print('measured'); pathlib.Path(sys.argv[1]).write_text('{\"mfu\": 0.5}')"
TESTS = """
import pathlib, sys
pathlib.Path(sys.argv[1]).write_text(
    '<testsuites><testsuite><testcase name="test_good[a]"/><testcase name="test_good[b]"/><testcase name="test_left">'
    '<skipped/></testcase><testcase name="test_bad[a]"><failure/></testcase><testcase name="test_bad[b]"/></testsuite>'
    "</testsuites>"
)
"""
MEMORY = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')"
COMPILER = "import sys; sys.exit('error: torch.compile: found no C compiler')"
HANGS = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"


def test_parts_that_fail_or_hang_are_named_and_repeated_alone(script, run, h100, monkeypatch, capsys):
    """Out of memory, no compiler, and one that has started a process of its own and hangs."""
    ok = {
        "figures": script.Part("how much?", ("-c", MEASURES, "FIGURES"), 60),
        "tests": script.Part("do they pass?", ("-c", TESTS, "{folder}/tests.xml"), 60),
    }
    bad = {
        "memory": script.Part("does it fit?", ("-c", MEMORY), 60),
        "compiler": script.Part("does it compile?", ("-c", COMPILER), 60),
        "late": script.Part("does it end?", ("-c", HANGS), 1),
        "two GPUs": script.Part("is one enough?", ("-c", "raise SystemExit(9)"), 60, gpus=2),
    }
    monkeypatch.setattr(script, "PARTS", ok | bad)
    monkeypatch.setattr(
        script,
        "CLAIMS",
        (
            script.tested("good", "training.md", "test_good"),
            script.tested("bad", "training.md", "test_good", "test_bad"),
            script.tested("left", "training.md", "test_good", "test_left"),
            script.measured("fast", "scaling.md", "figures", "mfu", least=0.4, card="H100"),
            script.measured("faster", "scaling.md", "figures", "mfu", least=0.6),
            script.measured("other", "scaling.md", "figures", "mfu", least=0.6, card="A100"),
            script.measured("none", "scaling.md", "late", "mfu", least=0.6),
        ),
    )
    status, report, page = run()
    assert status == 1 and report["of"]["device"] == "NVIDIA H100 80GB HBM3" and report["of"]["capability"] == "9.0"
    found = {name: each["status"] for name, each in report["parts"].items()}
    assert found == {"figures": 0, "tests": 0, "memory": 1, "compiler": 1, "late": None}
    assert report["parts"]["late"]["seconds"] < 30 and report["parts"]["figures"]["figures"] == {"mfu": 0.5}
    ends = {each["claim"]: each["end"] for each in report["claims"]}
    assert ends == {
        "good": "pass",
        "bad": "FAIL",
        "left": "not measured",
        "fast": "pass",
        "faster": "FAIL",
        "other": "not measured",
        "none": "not measured",
    }
    assert "CUDA out of memory. Tried to allocate 20.00 GiB" in page and "found no C compiler" in page
    assert "## late: out of time" in page and "    begun" in page and "| faster | scaling.md | mfu of figures" in page
    assert "2 claims hold, 2 fail, 3 were not measured" in capsys.readouterr().out

    ok["figures"] = replace(ok["figures"], quick=60, quick_command=("-c", MEASURES, "FIGURES", "quick"))
    monkeypatch.setattr(script, "PARTS", ok | {name: script.Part("now?", ("-c", ""), 60) for name in list(bad)[:3]})
    run("--quick")
    assert "figures: done after" in capsys.readouterr().out, "another command than before"
    run()
    printed = capsys.readouterr().out
    assert "figures: done after" in printed, "a quick part is not the whole"
    assert "tests: done before" in printed and "memory: done after" in printed, "what has failed is repeated"
    status, report, _ = run()
    printed = capsys.readouterr().out
    assert "figures: done before" in printed and "tests: done before" in printed and "memory: done before" in printed
    assert status == 1 and not any(each["status"] for each in report["parts"].values()), "claims still fail"


def test_what_no_time_is_left_for_is_said(script, run, h100, monkeypatch, capsys):
    monkeypatch.setattr(script, "PARTS", {"figures": script.Part("how much?", ("-c", MEASURES, "FIGURES"), 60)})
    monkeypatch.setattr(script, "CLAIMS", ())
    status, report, page = run("--minutes", "1e-9")
    assert status == 1 and report["not run"] == ["figures"] and "| figures | how much? | not run | |" in page
    assert "no time was left for figures: the same command continues" in capsys.readouterr().out


def test_pictures_show_plans_and_steps(script, tmp_path):
    plan = {"planned_step_seconds": 1.0, "planned_mfu": 0.4, "mfu": 0.35}
    rates = {"workloads": {"base, cuda": {"transformers": 10.0, "cloze bf16": 20.0}}}
    results = {name: script.Found("", 0, 1.0, "", figures) for name, figures in (("plan x", plan), ("step", rates))}
    assert script.draw(tmp_path, results) == ["plans.png", "step.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("plans.png", "step.png"))


@pytest.mark.slow
def test_it_is_rehearsed_on_the_cpu(run, monkeypatch, tmp_path):
    """Doctor, the tests that need a GPU, and a step as planned and as measured: real commands, at a small size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    status, report, page = run("--rehearse", "--only", "doctor", "tests", "plan base@128")
    assert status == 0, page
    assert {name: each["status"] for name, each in report["parts"].items()} == {
        "doctor": 0,
        "tests": 0,
        "plan base@128": 0,
    }
    assert set(report["parts"]["tests"]["tests"].values()) == {"skipped"}
    figures = report["parts"]["plan base@128"]["figures"]
    assert figures["step_seconds"] > 0 and figures["planned_step_seconds"] > 0 and "bytes" not in figures
    assert "![plans.png](plans.png)" in page
