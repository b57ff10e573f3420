"""How fast a run goes: tokens a second, share of padding, data wait, model FLOPs utilisation."""

from __future__ import annotations

import time

import torch

# Dense 16-bit peaks in FLOP/s from NVIDIA's data sheets, by a part of the device's name; the first match counts.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(device: torch.device) -> float | None:
    """Peak of one device in FLOP/s for 16-bit matrix products, or None if it is not known."""
    name = f" {device_name(device).replace('-', ' ')} "  # whole words: an "RTX A1000" is no "A100"
    return next((peak for part, peak in PEAK_FLOPS.items() if f" {part} " in name), None)


class Throughput:
    """Counts what this rank does between two lines of metrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self._data_wait = 0.0
        self.tokens = 0
        self.flops = 0.0

    def exclude(self, seconds: float) -> None:
        """Leave out time that was not training: an evaluation, a checkpoint."""
        self._start += seconds

    def wait(self, seconds: float) -> None:
        """Time that the step loop waited for data."""
        self._data_wait += seconds

    def add(self, tokens: int, flops: float) -> None:
        """Real tokens of this rank, and the model FLOPs that they need (model/flops.py)."""
        self.tokens += tokens
        self.flops += flops

    @property
    def seconds(self) -> float:
        return max(1e-9, time.perf_counter() - self._start)

    @property
    def data_wait_share(self) -> float:
        return self._data_wait / self.seconds
