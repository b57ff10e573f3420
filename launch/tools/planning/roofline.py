"""Time of the kernels of a trace on a device that is described by a few figures (assumptions.py)."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from cloze.launch.tools.planning.assumptions import (
    COMPILED_HOST_SECONDS,
    CPU_HOST_SECONDS,
    HOST_SECONDS,
    KERNEL_SECONDS,
    LAUNCHES,
    LAUNCHES_TO_TRACED,
    LIST_TENSORS,
    PRODUCT_OVERHEAD_LENGTH,
    SPLIT_LENGTH,
    TILE,
)
from cloze.launch.tools.planning.machines import Machine
from cloze.launch.tools.planning.trace import Kernel, Trace


def launches(kernel: Kernel) -> int:
    """Number of device kernels of an operation."""
    if kernel.name.startswith(("_foreach", "_fused")):
        return math.ceil(kernel.tensors / LIST_TENSORS)
    return LAUNCHES.get(kernel.name, LAUNCHES.get(kernel.kind, 1))


def product_efficiency(machine: Machine, shape: tuple[int, ...]) -> float:
    """Share of the peak rate of a matrix product, from whole tiles, whole waves of processors and the overhead of a
    tile.

    Args:
        shape: batch, rows, inner length, columns.
    """
    batch, rows, inner, columns = shape
    if machine.is_cpu:
        return machine.best_product if batch == 1 else machine.batched_product
    tiles = batch * math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    in_tiles = batch * rows * columns / (tiles * TILE[0] * TILE[1])
    parts = max(1, min(inner // SPLIT_LENGTH, machine.processors // tiles)) if tiles < machine.processors else 1
    waves = math.ceil(tiles * parts / machine.processors)
    busy = tiles * parts / (waves * machine.processors)
    length = inner / parts
    return machine.best_product * in_tiles * busy * length / (length + PRODUCT_OVERHEAD_LENGTH)


def kernel_seconds(machine: Machine, kernel: Kernel) -> float:
    """Maximum of compute time and memory time, plus the overhead of each launch."""
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
    """The kernels that are left where the layers are compiled: all single operations of a layer that wait for the same
    product, or other kernel apart, become one, which reads what comes from outside and writes what is used outside.
    Results that are computed from almost nothing, such as masks of a few numbers, are computed again at each use.
    tests/gpu/test_compiled.py holds the bytes to those of Inductor's own kernels.
    """
    kernels = _without_remade(trace.kernels)
    stages: dict[int, int] = {}  # by storage: the kernel apart, by its index + 1, that it waits for; 0: none
    groups: dict[int, list[Kernel]] = {}
    readers: dict[int, set[int]] = {}
    for index, kernel in enumerate(kernels):
        stage = max((stages.get(number, 0) for number, _ in kernel.reads), default=0)
        group = stage
        if kernel.kind != "pointwise" or not kernel.in_layer:
            stage, group = index + 1, -index - 1
        groups.setdefault(group, []).append(kernel)
        for number, _ in kernel.reads:
            readers.setdefault(number, set()).add(group)
        for number, _ in kernel.writes:
            stages[number] = stage
    return [_fused(kernels, group, readers) if group >= 0 else kernels[0] for group, kernels in groups.items()]


# Bytes that an operation writes for each that it reads, from which on its result is made again and not kept: what to
# keep for backward is decided by torch's partitioner, which keeps the fewest bytes (functorch, min-cut).
_REMADE = 16


def _without_remade(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels without the pointwise operations whose results are made again: only pointwise operations read them,
    and their inputs have far fewer bytes. Their readers read the inputs instead.
    """
    needed: set[int] = set()  # storages that stay in memory: not only pointwise operations read them
    for kernel in kernels:
        if kernel.kind != "pointwise" or not kernel.in_layer:
            needed.update(number for number, _ in (*kernel.reads, *kernel.writes))
    sources: dict[int, dict[int, int]] = {}  # storage that is made again -> the storages of its inputs
    left = []
    for kernel in kernels:
        reads: dict[int, int] = {}
        for number, size in kernel.reads:
            reads |= sources.get(number, {number: size})
        written = [number for number, _ in kernel.writes]
        alone = all(number in sources or number not in reads for number in written)  # else it changes what was there
        if (
            kernel.kind == "pointwise"
            and kernel.in_layer
            and alone
            and not needed.intersection(written)
            and _REMADE * sum(reads.values()) <= sum(size for _, size in kernel.writes)
        ):
            sources |= dict.fromkeys(written, reads)
        else:
            left.append(replace(kernel, reads=tuple(reads.items())))
    return left


def _fused(kernels: list[Kernel], group: int, readers: dict[int, set[int]]) -> Kernel:
    reads: dict[int, int] = {}
    written: dict[int, int] = {}
    for kernel in kernels:
        for number, size in kernel.reads:
            if number not in written:
                reads[number] = max(size, reads.get(number, 0))
        for number, size in kernel.writes:
            written[number] = max(size, written.get(number, 0))
    # A tensor that no kernel reads is a result: a gradient, a loss.
    kept = {
        number: size for number, size in written.items() if number in reads or readers.get(number, set()) != {group}
    }
    return Kernel("fused", "pointwise", reads=tuple(reads.items()), writes=tuple(kept.items()), in_layer=True)


@dataclass(frozen=True)
class Cost:
    """Time of kernels by kind."""

    device_seconds: float
    """If the device never waits for the host."""
    host_seconds: float
    """Seconds in which the host launches the kernels."""
    launches: int
    by_kind: dict[str, float]
    """Parts of device_seconds: product, attention, pointwise, other."""
    seconds: float
    """Elapsed seconds: a GPU waits for the host, or the host for the GPU; a CPU does one after the other."""


def cost(machine: Machine, trace: Trace, *, compiled: bool = False) -> Cost:
    """Total cost of the kernels of a trace."""
    kernels = fuse(trace) if compiled else trace.kernels
    by_kind: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_kind[kernel.kind.removesuffix("_backward")] += kernel_seconds(machine, kernel)
    count, device = sum(map(launches, kernels)), sum(by_kind.values())
    if machine.is_cpu:
        return Cost(device, count * CPU_HOST_SECONDS, count, dict(by_kind), device + count * CPU_HOST_SECONDS)
    host = LAUNCHES_TO_TRACED * sum(
        launches(kernel) * (COMPILED_HOST_SECONDS if compiled and kernel.in_layer else HOST_SECONDS)
        for kernel in kernels
    )
    untraced = round((LAUNCHES_TO_TRACED - 1) * count)
    by_kind["other"] += untraced * KERNEL_SECONDS
    device += untraced * KERNEL_SECONDS
    return Cost(device, host, count + untraced, dict(by_kind), max(device, host))
