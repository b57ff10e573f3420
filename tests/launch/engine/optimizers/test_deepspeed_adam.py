"""What is compiled at its first use: once for all processes, also after one that was killed while it compiled."""

import functools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import cpuinfo
import pytest
import torch
from torch.utils import cpp_extension

from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.optimizers import build_optimizer, deepspeed_adam
from cloze.launch.engine.optimizers.deepspeed_adam import compiled_once, imported
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launching import children, finish

SOURCE = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", "%s"};
extern "C" PyObject* PyInit_tiny() { return PyModule_Create(&module); }
"""
# Notes that it compiles, and the first time takes so long that it is killed before, or goes on without who called it.
COMPILER = """#!{python}
import os, sys, time
if "-c" in sys.argv:
    with open({calls!r}, "a+") as file:
        first = file.write("x") and file.tell() == 1
        file.flush()
    time.sleep({seconds} if first else 0)
os.execvp("g++", ["g++", *sys.argv[1:]])
"""


def load_tiny(command: list[str]) -> int:
    """Load a module that C++ defines, and print its docstring."""

    def load(library: Path | None) -> str:
        return (cpp_extension.load("tiny", command) if library is None else imported("tiny", library)).__doc__

    print("loaded", compiled_once("tiny", load))
    return 0


@pytest.fixture
def machine(tmp_path):
    """A source and a compiler that takes its time at its first call, and what starts a process that loads the source's
    module.
    """

    class Machine:
        calls = tmp_path / "calls"
        variables = {"CXX": str(tmp_path / "compiler"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}

        def __init__(self) -> None:
            (tmp_path / "tiny.cpp").write_text(SOURCE % "whole")
            self.takes(0)

        def takes(self, seconds: float) -> None:
            compiler = Path(self.variables["CXX"])
            compiler.write_text(COMPILER.format(python=sys.executable, calls=str(self.calls), seconds=seconds))
            compiler.chmod(0o700)

        def start(self, **more: str) -> ForkedRun:
            return ForkedRun([str(tmp_path / "tiny.cpp")], main=load_tiny, **self.variables, **more)

        def compilations(self) -> int:
            return self.calls.stat().st_size if self.calls.exists() else 0

    return Machine()


def test_what_was_compiled_for_other_gpus_is_not_loaded(machine):
    """Who had named the wrong ones had to find and remove the folder by hand."""
    for architectures, compilations in (("7.0", 1), ("9.0", 2), ("7.0", 2)):
        finish(machine.start(TORCH_CUDA_ARCH_LIST=architectures))
        assert machine.compilations() == compilations


def kill_but_compilers(run: ForkedRun) -> None:
    """SIGKILL a run's own processes: what they have started goes on, as when the kernel kills for want of memory."""
    for pid in (run.pid, *children(run.pid)):
        os.kill(pid, signal.SIGKILL)


def test_one_process_compiles_for_all(machine):
    machine.takes(1)
    said = [finish(run) for run in [machine.start() for _ in range(3)]]
    assert all("loaded whole" in each for each in said)
    assert sum("compiling tiny for this machine, once" in each for each in said) == machine.compilations() == 1
    assert "compiling" not in finish(machine.start()) and machine.compilations() == 1


def test_killed_while_it_compiles(machine):
    machine.takes(3)
    killed = machine.start()
    while not machine.compilations():
        time.sleep(0.01)
    kill_but_compilers(killed)
    started = time.monotonic()
    assert "loaded whole" in finish(machine.start())
    assert machine.compilations() == 2 and time.monotonic() - started < 60, "torch's own lock is waited for without end"
    assert "loaded whole" in finish(machine.start()) and machine.compilations() == 2
    assert [path.name for path in Path(machine.variables["TORCH_EXTENSIONS_DIR"]).glob("*/*/*/lock")] == []


def test_what_is_whole_is_loaded_without_ninja_or_a_compiler(machine, tmp_path):
    """torch would compile in place there: with another version of ninja, other flags, or beside a lock that is left."""
    finish(machine.start())
    (compiled,) = (tmp_path / "extensions").glob("*/compiled/tiny")
    (compiled / "lock").touch()
    machine.variables = machine.variables | {"CXX": shutil.which("false"), "CXXFLAGS": "-O1", "PATH": str(tmp_path)}
    before = sorted((path.name, path.stat().st_mtime_ns) for path in compiled.iterdir())
    assert "loaded whole" in finish(machine.start()) and machine.compilations() == 1
    assert sorted((path.name, path.stat().st_mtime_ns) for path in compiled.iterdir()) == before


def test_what_cannot_be_loaded_is_named(machine, tmp_path):
    finish(machine.start())
    (library,) = (tmp_path / "extensions").glob("*/compiled/tiny/tiny.so")
    library.write_bytes(b"")
    assert f"{library.parents[1]}: can't be loaded" in finish(machine.start(), None)
    library.unlink()
    assert f"{library.parents[1]}: can't be loaded" in finish(machine.start(), None)
    shutil.rmtree(library.parents[1])
    assert "loaded whole" in finish(machine.start()) and machine.compilations() == 2


def test_an_installation_that_compiled_for_another_device_is_none(machine, monkeypatch, tmp_path):
    """DeepSpeed would compile then, outside of the lock."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    monkeypatch.setitem(deepspeed_adam.installed_ops, "cpu_adam", True)
    monkeypatch.setattr(deepspeed_adam, "accelerator_name", "cuda")
    config = OptimizerConfig(implementation="deepspeed")
    with pytest.raises(UserError, match=r"file.*: .*; TORCH_EXTENSIONS_DIR names another folder for DeepSpeed's kern"):
        build_optimizer(torch.nn.Linear(2, 2), config, 1e-3, states_on_cpu=True)


def test_what_cannot_be_compiled(monkeypatch, tmp_path):
    """A compiler that fails leaves nothing that a later start would load."""
    # DeepSpeed asks three times for each of them, and each answer takes a process of its own a second.
    monkeypatch.setattr(cpuinfo, "get_cpu_info", functools.cache(cpuinfo.get_cpu_info))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("CXX", shutil.which("false"))
    config = OptimizerConfig(implementation="deepspeed")
    for _ in range(2):
        with pytest.raises(UserError, match=r"found deepspeed, whose DeepSpeedCPUAdam could not be built \(.*g\+\+"):
            build_optimizer(torch.nn.Linear(2, 2), config, 1e-3, states_on_cpu=True)
    assert not list((tmp_path / "extensions").glob("*/compiled"))
