"""The shim, compiled once, and the process that answers what a step asks of a fake GPU."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch

from tests.gpu.fake_cuda import ROOT, build
from tests.gpu.worker import Case, Report


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The compiled shim."""
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA, whose hooks it has already: no fake GPU beside them")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: no fake GPU")
    try:
        return build(tmp_path_factory.mktemp("fake_cuda"))
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the shim does not compile against this torch:\n{error.stderr[-3000:]}")


@pytest.fixture(scope="session")
def step(library, tmp_path_factory) -> Iterator[Callable[[Case], Report]]:
    """Asks what one step of a run like a Case does; each is answered once."""
    errors = tmp_path_factory.mktemp("worker") / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-m", "tests.gpu.worker", library], text=True, cwd=ROOT,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream)

        @functools.cache
        def ask(case: Case) -> Report:
            process.stdin.write(json.dumps(asdict(case)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"the worker is gone:\n{errors.read_text()[-3000:]}"
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return Report(**answer)

        try:
            yield ask
        finally:
            process.stdin.close()
            process.wait(60)
