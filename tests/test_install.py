"""`make env`: minutes of downloads, with a sign of life and without pip's noise; and how extras are added later."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = """import os, pathlib, sys, tempfile, time
assert sys.argv[1:3] == ["install", "--disable-pip-version-check"] and sys.argv[-2:] == ["--editable", "."]
seen, packages = pathlib.Path({seen!r}), pathlib.Path({packages!r})
def wait_for(stage):  # until it has been looked at, however busy the machine is
    deadline = time.monotonic() + 60
    while stage + "\\n" not in seen.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
for line in ("Collecting torch==2.13", "  Downloading torch.whl (190 MB)", "Requirement already satisfied: x"):
    print(line, flush=True)
wait_for("Downloading torch.whl (190 MB)")
with open(os.path.join(tempfile.gettempdir(), "torch.whl"), "wb") as file:
    file.truncate(57_000_000)
wait_for("Downloading torch.whl (190 MB), 57 MB fetched and unpacked")
(packages / "torch.dist-info").mkdir()
print("Installing collected packages: torch, numpy, rich", flush=True)
wait_for("Installing packages: 1 of 3")
(packages / "numpy.dist-info").mkdir()
wait_for("Installing packages: 2 of 3")
print("noise", file=sys.stderr)
sys.exit({status})
"""


@pytest.mark.parametrize("status", [0, 1])
def test_the_installation_says_what_it_is_at_and_what_pip_said_if_it_failed(tmp_path, monkeypatch, capfd, status):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    seen = tmp_path / "seen"
    seen.touch()
    (tmp_path / "pip/__main__.py").write_text(PIP.format(status=status, packages=str(tmp_path), seen=str(seen)))
    (tmp_path / "of-before.dist-info").mkdir()
    os.utime(tmp_path / "of-before.dist-info", (0, 0))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    described = importlib.util.spec_from_file_location("install", ROOT / ".ci/install.py")
    install = importlib.util.module_from_spec(described)
    described.loader.exec_module(install)
    stage_of = install._stage

    def note(*arguments):
        stage = stage_of(*arguments)
        seen.write_text(f"{seen.read_text()}{stage}\n")
        return stage

    monkeypatch.setattr(install, "_stage", note)
    monkeypatch.setattr(install, "SECONDS_A_LINE", 0.02)
    monkeypatch.setattr(install, "LINES_A_REPETITION", 1000)
    monkeypatch.setattr(install, "PACKAGES", tmp_path)
    assert install.main(["--editable", "."]) == status
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith(f"installing into {sys.prefix}: ")
    stages = [line.split(" s  ")[1] for line in said.err.splitlines() if " s  " in line]
    assert [stage for stage in stages if stage != "Starting"] == [
        "Downloading torch.whl (190 MB)",
        "Downloading torch.whl (190 MB), 57 MB fetched and unpacked",
        "Installing packages: 1 of 3",
        "Installing packages: 2 of 3",
    ], "each once"
    assert ("noise" in said.err and "already satisfied" in said.err) == bool(status)
    assert ("installed in" in said.err) == (not status)
