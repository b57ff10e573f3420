"""What is installed: every file of the floors under the name `cloze`, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.architecture.laws import ROOT

PARTS = ("pipeline", "model", "launch", "configs")


def tracked() -> list[str]:
    """What git keeps."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git here, which knows the files of the repository")
    names = listed.stdout.split("\0")
    return [name for name in names if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())]


def expected() -> set[str]:
    floors = {f"cloze/{name}" for name in tracked() if name.split("/")[0] in PARTS}
    return floors | {
        name
        for name in tracked()
        if name.startswith("cloze/") and name.count("/") == 1 and not (ROOT / name).is_symlink()
    }


def build(kind: str, source: Path, output: Path) -> Path:
    """What setuptools makes of a source tree, by the interface that pip uses."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    output.mkdir(exist_ok=True)
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(output)], cwd=source, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return output / made.stdout.strip().splitlines()[-1]


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def copy_of_repository(folder: Path) -> Path:
    """What git keeps, links as links: a build leaves files of its own beside its source."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def test_wheel_and_sdist_hold_every_file(tmp_path):
    source = copy_of_repository(tmp_path / "source")
    sdist = build("sdist", source, tmp_path / "sdist")
    assert files_of(build("wheel", source, tmp_path / "wheel")) == expected()
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert files_of(build("wheel", unpacked, tmp_path / "again")) == expected()
