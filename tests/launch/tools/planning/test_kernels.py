"""A plan for this machine uses the rates that `cloze doctor` has measured on it."""

import pytest
import torch

from cloze.launch.system import devices
from cloze.launch.tools.planning.kernels import KernelRates, keep_measured_kernels
from cloze.launch.tools.planning.machines import find_machine
from cloze.pipeline.errors import UserError


def test_this_machine_is_what_doctor_has_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="plan.device: found no measurement of CPU, expected one; run `cloze doctor`"):
        find_machine("cpu")
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    devices.keep_measured(cpu, {torch.bfloat16: 4e11, torch.float32: 1e11})
    for dtype in (torch.bfloat16, torch.float32):
        keep_measured_kernels(cpu, dtype, KernelRates(3e10, 2e9, 8e10, 5e10))
        keep_measured_kernels(cpu, dtype, KernelRates(1e10, 1e9, 7e10, 4e10))  # a busy machine's
    found, precise = find_machine("cpu"), find_machine("cpu", torch.float32)  # of the best ones
    assert (found.flops, found.bandwidth, found.elements) == (4e11, 3e10, 2e9) and found.memory_bytes > 1e9
    assert (found.best_product, found.batched_product) == (0.2, 0.125)
    assert (precise.flops, precise.best_product, precise.batched_product) == (1e11, 0.8, 0.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    with pytest.raises(UserError, match="found no measurement"):
        find_machine("cpu")  # of so many threads
