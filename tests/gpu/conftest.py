"""The shim, compiled once, and the process that answers what a step asks of a fake GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch

from tests.gpu.cases import Case, Compiled, Copied, Recipe
from tests.gpu.fake_cuda import ROOT, build
from tests.gpu.large_world import Part, Place
from tests.gpu.worker import Report


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
def worker(library, tmp_path_factory) -> Iterator[Callable[[Case | Place | Recipe | Compiled | Copied], dict]]:
    """The process that answers; each question is answered once."""
    errors = tmp_path_factory.mktemp("worker") / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.worker", library],
            text=True,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
        )

        @functools.cache
        def ask(question: Case | Place | Recipe | Compiled | Copied) -> dict:
            process.stdin.write(json.dumps(asdict(question)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"the worker is gone:\n{errors.read_text()[-3000:]}"
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return answer

        try:
            yield ask
        finally:
            process.stdin.close()
            process.wait(60)


@pytest.fixture(scope="session")
def step(worker) -> Callable[[Case], Report]:
    """Asks what one step of a run like a Case does."""
    return lambda case: Report(**worker(case))


@pytest.fixture(scope="session")
def part(worker) -> Callable[[Place], Part]:
    """Asks what one rank of a large world has."""
    return lambda place: Part(**worker(place))


@pytest.fixture(scope="session")
def peak_bytes(worker) -> Callable[[Recipe], int]:
    """Asks what a step of a recipe holds at most."""
    return lambda recipe: worker(recipe)["peak_bytes"]


@pytest.fixture(scope="session")
def compiled(worker) -> Callable[[Compiled], dict]:
    """Asks what Inductor makes of a model's layers."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: nothing makes a GPU's kernels")
    return worker
