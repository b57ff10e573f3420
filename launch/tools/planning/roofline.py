"""How long the kernels of a trace take, on a device that is known by a few figures (assumptions.py)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from cloze.launch.tools.planning.assumptions import (
    COMPILED_HOST_SECONDS,
    CPU_BATCHED_PRODUCT,
    CPU_HOST_SECONDS,
    HOST_SECONDS,
    KERNEL_SECONDS,
    LAUNCHES,
    LIST_TENSORS,
    PRODUCT_OVERHEAD_LENGTH,
    SPLIT_LENGTH,
    TILE,
)
from cloze.launch.tools.planning.machines import Machine
from cloze.launch.tools.planning.trace import Kernel, Trace


def launches(kernel: Kernel) -> int:
    """Kernels on the device that an operation becomes."""
    if kernel.name.startswith(("_foreach", "_fused")):
        return math.ceil(kernel.tensors / LIST_TENSORS)
    return LAUNCHES.get(kernel.name, LAUNCHES.get(kernel.kind, 1))


def product_efficiency(machine: Machine, shape: tuple[int, ...]) -> float:
    """Share of the peak: whole tiles over whole waves of processors, begin and end of a tile, the best there is.

    `shape`: batch, rows, inner length, columns.
    """
    batch, rows, inner, columns = shape
    if machine.is_cpu:
        return machine.best_product if batch == 1 else CPU_BATCHED_PRODUCT
    tiles = batch * math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    in_tiles = batch * rows * columns / (tiles * TILE[0] * TILE[1])
    parts = max(1, min(inner // SPLIT_LENGTH, machine.processors // tiles)) if tiles < machine.processors else 1
    waves = math.ceil(tiles * parts / machine.processors)
    busy = tiles * parts / (waves * machine.processors)
    length = inner / parts
    return machine.best_product * in_tiles * busy * length / (length + PRODUCT_OVERHEAD_LENGTH)


def kernel_seconds(machine: Machine, kernel: Kernel) -> float:
    """The longer of computing and moving, and the filling and emptying of the device by every launch."""
    if kernel.kind == "product":
        computing = kernel.flops / (machine.flops * product_efficiency(machine, kernel.shape))
    elif kernel.flops:
        computing = kernel.flops / (machine.flops * machine.flash[kernel.kind == "attention_backward"])
    else:
        computing = 0.0
    if machine.is_cpu and kernel.kind != "product":
        computing = kernel.elements / machine.elements
    starting = 0.0 if machine.is_cpu else KERNEL_SECONDS * launches(kernel)
    return max(computing, kernel.bytes / machine.bandwidth) + starting


def fuse(trace: Trace) -> list[Kernel]:
    """The kernels that are left if neighbouring ones without products become one, as torch.compile makes them: it reads
    what comes from outside and writes what is used outside.
    """
    result, run, first = [], [], 0
    for index, kernel in enumerate([*trace.kernels, None]):
        if kernel is not None and kernel.kind == "pointwise":
            if not run:
                first = index
            run.append(kernel)
            continue
        if run:
            result.append(_fused(run, first, trace))
            run = []
        if kernel is not None:
            result.append(kernel)
    return result


def _fused(run: list[Kernel], first: int, trace: Trace) -> Kernel:
    made, reads, writes = set(), {}, {}
    for kernel in run:
        for number, size in kernel.reads:
            if number not in made:
                reads[number] = max(size, reads.get(number, 0))
        for number, size in kernel.writes:
            made.add(number)
            writes[number] = max(size, writes.get(number, 0))
    end = first + len(run)
    kept = {number: size for number, size in writes.items() if trace.last_use[number] >= end or number in reads}
    return Kernel("fused", "pointwise", reads=tuple(reads.items()), writes=tuple(kept.items()))


@dataclass(frozen=True)
class Cost:
    """What some kernels take."""

    device_seconds: float
    """If the device never waits for the host."""
    host_seconds: float
    """That the host takes to launch them."""
    launches: int
    by_kind: dict[str, float]
    """Of device_seconds: product, attention, pointwise, other."""
    seconds: float
    """By the clock: a GPU waits for the host, or the host for the GPU; a CPU does one after the other."""


def cost(machine: Machine, trace: Trace, *, compiled: bool = False) -> Cost:
    """Of all kernels of a trace, one after another."""
    kernels = fuse(trace) if compiled else trace.kernels
    by_kind: Counter = Counter()
    for kernel in kernels:
        by_kind[kernel.kind.removesuffix("_backward")] += kernel_seconds(machine, kernel)
    count, device = sum(map(launches, kernels)), sum(by_kind.values())
    if machine.is_cpu:
        return Cost(device, count * CPU_HOST_SECONDS, count, dict(by_kind), device + count * CPU_HOST_SECONDS)
    host = count * (COMPILED_HOST_SECONDS if compiled else HOST_SECONDS)
    return Cost(device, host, count, dict(by_kind), max(device, host))
