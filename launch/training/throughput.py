"""Throughput: tokens per second, share of padding, data wait, model FLOPs utilisation; and the slowest rank."""

from __future__ import annotations

import time

import torch

from cloze.launch.system import distributed
from cloze.launch.system.devices import Stopwatch
from cloze.launch.system.memory import peak_bytes


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process in bytes: on a GPU since the last call, elsewhere since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return peak_bytes()


class Throughput:
    """Counts this rank's tokens, FLOPs and times between two lines of metrics."""

    def __init__(self, device: torch.device, peak: float | None) -> None:
        """peak: FLOP/s of this process's device, if it is known."""
        self._device, self.peak = device, peak
        self.passes = Stopwatch(device)
        """Time of this rank's own work in each step: from the synchronization of all ranks to its last backward, after
        which they synchronize again.
        """
        self.slow: tuple[int, float, float] | None = None
        """The rank that is far slower than the others, its seconds per step, and the median's."""
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self._data_wait = 0.0
        self._save_wait = 0.0
        self._steps = 0
        self.tokens = 0
        self.flops = 0.0

    def exclude(self, seconds: float, phase: str) -> None:
        """Exclude time that was not training: `evaluate` or `save`."""
        self._start += seconds
        if phase == "save":
            self._save_wait += seconds

    def wait(self, seconds: float) -> None:
        """Add time that the step loop waited for data."""
        self._data_wait += seconds

    def add(self, tokens: int) -> None:
        """Count a step with `tokens` real tokens on this rank; the caller adds their FLOPs (model/flops.py) to
        `flops`.
        """
        self._steps += 1
        self.tokens += tokens

    def scalars(self) -> dict[str, float]:
        """Curves of the steps since the last reset, over all ranks. Collective."""
        steps = max(1, self._steps)
        seconds = max(1e-9, time.perf_counter() - self._start)
        measured = torch.tensor(
            [
                self.tokens,
                self.flops,
                seconds,
                self._data_wait,
                self._save_wait,
                peak_memory(self._device),
                self.peak or 0.0,
                self.passes.take(),
            ],
            dtype=torch.float64,
        )
        ranks = distributed.gather(measured.to(self._device)).cpu()
        tokens, flops, seconds, data_wait, save_wait, memory, peaks, passes = ranks.T
        scalars = {
            "speed/tokens_per_second": float(tokens.sum() / seconds.mean()),
            "speed/data_wait_share": float((data_wait / seconds).mean()),
            **_spread("speed/step_seconds", seconds / steps),
            **_spread("speed/data_wait_seconds", data_wait / steps),
            **_spread("speed/pass_seconds", passes / steps),
            "memory/peak_gib": float(memory.max()) / 2**30,
        }
        self.slow = _slowest((data_wait + passes) / steps)
        if save_wait.max() > 0:
            scalars["speed/checkpoint_wait_seconds"] = float(save_wait.max())
        # each rank has measured its own machine's peak; decisions by the MFU must be the same on all ranks
        if peaks.min() > 0:
            scalars["speed/mfu"] = float(flops.sum() / seconds.mean() / peaks.sum())
        return scalars


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Median over the ranks, and with several ranks the minimum and maximum."""
    extremes = {f"{name}/min": float(values.min()), f"{name}/max": float(values.max())}
    return {name: float(values.quantile(0.5)), **(extremes if len(values) > 1 else {})}


# A rank is reported as slow if it takes this many times as long as the median rank; the variation by batches of
# different lengths stays below (docs/scaling.md, Measured: stragglers).
_SLOW = 1.3


def _slowest(seconds: torch.Tensor) -> tuple[int, float, float] | None:
    """From the seconds of each rank: the rank that is far slower than the median, its seconds and the median's; else
    None.
    """
    rank, median = int(seconds.argmax()), float(seconds.quantile(0.5, interpolation="lower"))
    longest = float(seconds[rank])
    return (rank, longest, median) if longest > _SLOW * median else None
