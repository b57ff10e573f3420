"""Inductor and Triton for a GPU that computes nothing: they write and compile its kernels, and none is run.

What is patched are the places where they ask a driver; to be called in a process of its own, after fake_cuda.install.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass, field


@dataclass
class Kernels:
    """What Inductor has made."""

    started: list[tuple[str, int]] = field(default_factory=list)
    """Name of each kernel that was started, and bytes of what it reads and writes."""
    binaries: dict[str, int] = field(default_factory=dict)
    """Bytes of each compiled kernel's binary, by name."""


class _Device(contextlib.nullcontext):
    """torch.cuda.device, a class of which some are made and asked for."""

    def __init__(self, *_) -> None:
        super().__init__()


def install(capability: int, binaries: bool) -> Kernels:
    """Let torch.compile make kernels for this compute capability (90: an H100).

    Args:
        binaries: whether Triton compiles them, too.
    """
    import torch
    import torch._dynamo.device_interface as interface
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton

    made, cuda = Kernels(), torch.cuda
    sheet = types.SimpleNamespace(
        total_memory=80 << 30,
        multi_processor_count=132,
        name="NVIDIA H100 80GB HBM3",
        major=capability // 10,
        minor=capability % 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=232448,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        clock_rate=1_980_000,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
        gcnArchName="",
        uuid="",
        pci_bus_id=0,
    )
    cuda.get_device_properties = lambda *_: sheet
    cuda.get_device_capability = lambda *_: (capability // 10, capability % 10)
    cuda._is_compiled = lambda: True
    # A function each: torch.compile's tables take none twice.
    cuda._exchange_device, cuda._maybe_exchange_device = (lambda _: 0), (lambda _: 0)
    cuda._DeviceGuard, cuda.device = (lambda *_: contextlib.nullcontext()), _Device
    for name in ("exchange_device", "maybe_exchange_device"):
        setattr(interface.CudaInterface, name, staticmethod(lambda _: 0))
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(tensor, size, stride, offset)
    guards.assert_size_stride, guards.assert_alignment = (lambda *_: None), (lambda *_: None)
    driver = _driver(capability)
    triton.runtime.driver.set_active(driver)
    helpers.set_driver_to_gpu = lambda: triton.runtime.driver.set_active(driver)
    inductor.compile_threads, inductor.joint_graph_constant_folding = 1, False
    inductor.force_disable_caches, inductor.use_static_cuda_launcher = True, False  # whose kernels keep no binary

    def note(kernel) -> None:
        for result in kernel.compile_results:
            made.binaries[kernel.fn.__name__] = len(result.kernel.asm["cubin"])
        kernel.launchers = [lambda *_, **__: None]

    def run(kernel, *arguments, **_) -> None:
        if binaries and not getattr(kernel, "launchers", None):
            kernel.precompile()
        size = 0
        for name, value in zip(kernel.fn.arg_names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                size += value.nbytes * (2 if name.startswith("in_out") else 1)
        made.started.append((kernel.fn.__name__, size))

    autotuner = heuristics.CachingAutotuner
    autotuner._make_launchers, autotuner.run = note, run
    if not binaries:
        autotuner.precompile = lambda *_, **__: None
    return made


def _driver(capability: int):
    """What Triton asks of a GPU's driver."""
    import torch
    from triton.backends.compiler import GPUTarget

    properties = {
        "max_shared_mem": 232448,
        "multiprocessor_count": 132,
        "sm_clock_rate": 1_980_000,
        "mem_clock_rate": 2_619_000,
        "mem_bus_width": 5120,
        "warpSize": 32,
        "max_num_regs": 65536,
    }
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        set_current_device=lambda _: None,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
        map_python_to_cpp_type=lambda name: name,
        utils=types.SimpleNamespace(get_device_properties=lambda _: properties),
    )
