"""What is set before torch is imported."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cloze.launch.system.devices import bf16_slowdown
from cloze.launch.system.environment import process
from cloze.launch.system.environment.process import PRIMITIVE_CACHES, bound_primitive_caches
from cloze.model.amx import extra_rows
from tests.forked import ForkedRun
from tests.launching import finish


def resident_mb() -> float:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("RssAnon:") + 1]) / 1024


def grows(arguments: list[str]) -> int:
    """Print by how many MB products of ever new shapes let a process grow."""
    (mode,) = arguments  # leave; bound: as a run does; capacity: without rounding row counts
    for name in PRIMITIVE_CACHES:  # of a test before this one in the process that has forked this one
        os.environ.pop(name, None)
    if mode == "capacity":
        os.environ.update(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    if mode != "leave":
        bound_primitive_caches()
    torch.set_num_threads(1)
    linear = torch.nn.Linear(64, 256).bfloat16()
    before = 0.0
    for number in range(210):
        if number == 10:
            before = resident_mb()
        count = 1000 + number
        count += extra_rows(count, False) if mode == "bound" else 0
        linear(torch.ones(count, 64, dtype=torch.bfloat16)).sum().backward()
    print(resident_mb() - before)
    return 0


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is read from /proc")
def test_products_of_ever_new_shapes_do_not_fill_the_memory():
    if bf16_slowdown(torch.device("cpu")) > 10:
        pytest.skip("this processor has no products of bf16 to compile, and takes minutes for these")
    unbounded, bound, capacity = (
        float(finish(ForkedRun([mode], main=grows))) for mode in ("leave", "bound", "capacity")
    )
    if unbounded < 30:
        pytest.skip("this processor keeps no compiled products of bf16")
    assert bound < unbounded / 2 < capacity


@pytest.mark.parametrize(
    "given",
    [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}],
)
def test_segments_expand_before_torch_is_imported_unless_the_user_has_set_the_allocator(given):
    code = (
        "import os, sys; from cloze.launch.system.environment.process import protect_process; protect_process(); "
        "from cloze.launch import cli; assert 'torch' not in sys.modules; "
        "import json; print(json.dumps({name: os.environ[name] for name in os.environ if 'ALLOC_CONF' in name}))"
    )
    variables = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | given
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_trace_does_not_slow_the_steps_after_it_unless_the_user_says_so(monkeypatch):
    for given, expected in ((None, "1"), ("0", "0")):
        monkeypatch.setattr(os, "environ", {} if given is None else {"TEARDOWN_CUPTI": given})
        process.protect_process()
        assert os.environ["TEARDOWN_CUPTI"] == expected
