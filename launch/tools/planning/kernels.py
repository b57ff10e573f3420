"""Rates of a device's kernels that a plan needs beside its best product; `cloze doctor` measures and saves them."""

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import torch

from cloze.launch.system.devices import bf16_slowdown, keep_rates, rate_key, saved_rates, synchronize

_SECONDS = 1.0
# Bytes of a copy that counts as bandwidth: far beyond every cache, below what any device has free. Elements of a GELU
# that fits a core's cache, many times: what a CPU computes, not what it moves.
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}
_ELEMENTS, _GELUS = 1 << 18, 32
# Linear layers whose inputs, outputs and gradients exceed a core's cache: tokens, width, number of layers.
_LINEAR = 2048, 512, 8
# `bf16_slowdown` of a CPU that computes bf16 without instructions for it (127 on a Zen 3); it is 0.3 to 1 with them.
_EMULATED = 10.0
# Attention heads of some BERT sequences: number, tokens, head size.
_HEADS = 384, 128, 64


@dataclass(frozen=True)
class KernelRates:
    """Measured rates of a device that a plan needs beside its best matrix product."""

    copy: float
    """Bytes/s of a long copy, read and written."""
    gelu: float
    """Elements/s of GELU: pointwise operations of a CPU are limited by arithmetic too."""
    linear: float
    """FLOP/s of forward and backward of linear layers whose operands are not in the cache."""
    batched: float
    """FLOP/s of forward and backward of attention's batched products."""


def measured_kernels(device: torch.device, dtype: torch.dtype) -> KernelRates | None:
    """The rates that `cloze doctor` has measured and saved, or None."""
    kept = saved_rates()
    rates = KernelRates(*(kept.get(key, 0.0) for key in _kernel_keys(device, dtype)))
    return rates if all(astuple(rates)) or device.type == "cuda" and rates.copy else None  # a GPU's plan reads no more


def measure_kernels(
    device: torch.device,
    dtype: torch.dtype,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> KernelRates:
    """The best rates in so many seconds of trials (at least one each), with this process's number of threads."""
    numbers = torch.Generator(device).manual_seed(0)  # its own: a run's random state stays as it is

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=numbers).to(dtype)

    source = torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device)
    target, values = torch.empty_like(source), torch.zeros(_ELEMENTS, dtype=dtype, device=device)
    tokens, width, count = _LINEAR
    if dtype is torch.bfloat16 and bf16_slowdown(device) > _EMULATED:
        count = 1  # each takes seconds
    inputs, gradients = drawn(count, tokens, width), drawn(count, tokens, width)
    weight, bias = drawn(width, width), drawn(width)
    heads, scores = drawn(*_HEADS), drawn(_HEADS[0], _HEADS[1], _HEADS[1])

    def linear() -> None:
        kept = []  # as forward keeps what backward reads
        for layer_inputs, gradient in zip(inputs, gradients, strict=True):
            kept += [
                torch.nn.functional.linear(layer_inputs, weight, bias),
                gradient @ weight,
                gradient.t() @ layer_inputs,
            ]

    def attention() -> None:
        kept = [torch.bmm(heads, heads.transpose(1, 2)), torch.bmm(scores, heads)]
        kept.append(torch.bmm(scores.transpose(1, 2), heads))

    works: tuple[tuple[Callable[[], object], float], ...] = (
        (lambda: target.copy_(source), 2.0 * source.numel()),
        (lambda: [torch.nn.functional.gelu(values) for _ in range(_GELUS)], float(_GELUS * _ELEMENTS)),
        (linear, 3 * 2.0 * count * tokens * width * width),
        (attention, 3 * 2.0 * math.prod(_HEADS) * _HEADS[1]),
    )
    for work, _ in works:  # the first call chooses kernels and allocates memory
        work()
    end, best = time.monotonic() + seconds, [0.0] * len(works)
    while True:
        for place, (work, amount) in enumerate(works):
            synchronize(device)
            began = clock()
            work()
            synchronize(device)
            best[place] = max(best[place], amount / (clock() - began))
        if time.monotonic() >= end:
            return KernelRates(*best)


def keep_measured_kernels(device: torch.device, dtype: torch.dtype, rates: KernelRates) -> None:
    """Save the results of `measure_kernels` for this user's plans, each unless a higher one is saved already.

    Raises:
        UserError: the file can't be written.
    """
    keep_rates(dict(zip(_kernel_keys(device, dtype), astuple(rates), strict=True)))


def _kernel_keys(device: torch.device, dtype: torch.dtype) -> list[str]:
    """One key a rate. Unlike the best product, these do not scale with the threads: saved per number of threads."""
    threads = "" if device.type == "cuda" else f" of {torch.get_num_threads()} threads"
    return [rate_key(device, f"{dtype} {rate.name}{threads}") for rate in fields(KernelRates)]
