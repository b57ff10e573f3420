"""What is missing to compile for a GPU: each thing planted, named with what brings it."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from cloze.launch.system import compiling
from cloze.launch.system.environment import compilers
from cloze.launch.tools import doctor_checks

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, which has all that is looked for, and on which the kernel fails; its folder."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    (tmp_path / "libcuda.so.1").touch()
    for name in ("CC", "TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compilers.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: tmp_path / name)
    monkeypatch.setattr(compiling.torch.version, "cuda", "13.0")

    def fail(device):
        raise AssertionError("ptxas: too old\nand a long command line")

    monkeypatch.setattr(compiling, "_compile_one", fail)
    listing = (
        f"2 libs found\n\tlibc.so.6 (libc6) => /lib/libc.so.6\n\tlibcuda.so.1 (libc6) => {tmp_path}/libcuda.so.1\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listing))
    return tmp_path


def without_triton(folder, monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)


def without_compiler(folder, monkeypatch):
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)


def without_headers(folder, monkeypatch):
    (folder / "include/Python.h").unlink()


def without_driver(folder, monkeypatch):
    (folder / "libcuda.so.1").unlink()


def with_an_old_assembler(folder, monkeypatch):
    """All is there."""


@pytest.mark.parametrize(
    ("plant", "what", "package"),
    [
        (without_triton, "no Triton", "pip install triton"),
        (without_compiler, "no C compiler", "gcc libc6-dev"),
        (without_headers, "include/Python.h", "python3-dev"),
        (without_driver, "no libcuda.so.1", "container toolkit"),
        (with_an_old_assembler, "'ptxas: too old'", ""),
    ],
)
def test_what_is_missing_is_named_with_what_brings_it(machine, monkeypatch, plant, what, package):
    plant(machine, monkeypatch)
    (finding,) = doctor_checks.compilation(GPU)
    assert finding.verdict == "warning" and what in finding.found and package in finding.advice


def test_a_machine_on_which_the_kernel_runs_lacks_nothing(machine, monkeypatch):
    without_driver(machine, monkeypatch)  # another version of Triton may look elsewhere
    monkeypatch.setattr(compiling, "_compile_one", lambda device: None)
    (finding,) = doctor_checks.compilation(GPU)
    assert (finding.verdict, finding.advice) == ("ok", "")
    (finding,) = doctor_checks.compilation(torch.device("cpu"))
    assert finding.verdict == "skipped"


def test_the_driver_is_looked_for_where_triton_looks(machine, monkeypatch):
    assert compilers.cuda_driver_folder() == str(machine)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
    assert compilers.cuda_driver_folder() is None
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{machine}")
    assert compilers.cuda_driver_folder() == str(machine)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/given")
    assert compilers.cuda_driver_folder() == "/given"
