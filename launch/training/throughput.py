"""Throughput: tokens per second, share of padding, data wait, model FLOPs utilisation; a rank that all wait for."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping

import torch

from cloze.launch.config import RunConfig
from cloze.launch.run.heartbeat import Heartbeat
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import Stopwatch, measured_anew, numbers_on, peak_warning
from cloze.launch.system.memory import GIB, peak_bytes
from cloze.launch.training.callbacks import Callback, RunView

# A rank is reported as slow if it takes this many times as long as the median rank; the variation by batches of
# different lengths stays below (docs/scaling.md, Measured: stragglers).
_SLOW = 1.3


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process in bytes: on a GPU since the last call, elsewhere since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return peak_bytes()


class Throughput:
    """Counts this rank's tokens, FLOPs and times between two lines of metrics."""

    def __init__(self, device: torch.device, peak: float | None, heartbeat: Heartbeat) -> None:
        """peak: FLOP/s of this process's device, if it is known."""
        self._device, self.peak, self.heartbeat = device, peak, heartbeat
        self.utilization: float | None = None
        """Model FLOPs over the peak of all devices, as of the last `scalars`; None: a peak is not known."""
        self.passes = Stopwatch(device)
        """Time of this rank's own work in each step: from the synchronization of all ranks to its last backward, after
        which they synchronize again.
        """
        self.work_seconds = torch.zeros(1)
        """Seconds a step of each rank for its data and its passes, as of the last `scalars`: (ranks,)."""
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self._data_wait = 0.0
        self._save_wait = 0.0
        self._steps = 0
        self.tokens = 0
        self.flops = 0.0

    @contextlib.contextmanager
    def pause(self, step: int, phase: str) -> Iterator[None]:
        """Context of work that is not training, `evaluate` or `save`, whose time does not count."""
        self.heartbeat.beat(step, phase)
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._start += seconds
        if phase == "save":
            self._save_wait += seconds
        self.heartbeat.beat(step, "data")

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
            "memory/peak_gib": float(memory.max()) / GIB,
        }
        self.work_seconds = (data_wait + passes) / steps
        if save_wait.max() > 0:
            scalars["speed/checkpoint_wait_seconds"] = float(save_wait.max())
        # each rank has measured its own machine's peak; decisions by the MFU must be the same on all ranks
        self.utilization = float(flops.sum() / seconds.mean() / peaks.sum()) if peaks.min() > 0 else None
        return scalars


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Median over the ranks, and with several ranks the minimum and maximum."""
    extremes = {f"{name}/min": float(values.min()), f"{name}/max": float(values.max())}
    return {name: float(values.quantile(0.5)), **(extremes if len(values) > 1 else {})}


class Utilization(Callback):
    """Adds `speed/mfu` (model FLOPs utilization) to a line of metrics, where it can be true."""

    def __init__(self, throughput: Throughput, device: torch.device, dtype: torch.dtype, console: Console) -> None:
        self._throughput, self._device, self._dtype, self._console = throughput, device, dtype, console
        self._doubted = False

    def on_log(self, run: RunView, scalars: Mapping[str, float]) -> Mapping[str, float] | None:
        """`speed/mfu`. A share above 1 shows that the saved peaks are wrong: they are measured again, once a run, and
        the share of the new peaks is returned, or None if that is above 1 too. Then it is collective.
        """
        share = self._throughput.utilization
        if share is not None and share > 1:
            share = None if self._doubted else self._measured_anew(share, run.rank == 0)
        return None if share is None else {"speed/mfu": share}

    def _measured_anew(self, share: float, is_main: bool) -> float | None:
        self._doubted = True
        self._console.warn(
            f"speed/mfu: {share:.0%} of the peak is impossible and not shown: {peak_warning(self._device)}"
        )
        before = self._throughput.peak or 0.0
        # None for a device with a data sheet, which other ranks may lack.
        measured = measured_anew(self._device, self._dtype, is_main)
        self._throughput.peak = max(before, measured or 0.0)
        old, new = distributed.reduce_sum(numbers_on(self._device, before, self._throughput.peak)).tolist()
        share *= old / new
        return share if share <= 1 else None


def _slowest(seconds: torch.Tensor) -> tuple[int, float, float] | None:
    """From the seconds of each rank: the rank that is far slower than the median, its seconds and the median's; else
    None.
    """
    rank, median = int(seconds.argmax()), float(seconds.quantile(0.5, interpolation="lower"))
    longest = float(seconds[rank])
    return (rank, longest, median) if longest > _SLOW * median else None


class SlowRanks(Callback):
    """Names, once, a rank that was far slower than the others in all lines of metrics for `monitor.hang_seconds`."""

    def __init__(self, config: RunConfig, throughput: Throughput, console: Console) -> None:
        super().__init__(config)
        self._throughput, self._console = throughput, console
        self._since = -1, math.inf  # the rank that the others wait for, and the moment since when
        self._named: set[int] = set()

    def on_log(self, run: RunView, scalars: Mapping[str, float]) -> None:
        """Look at the line's slowest rank."""
        slow, now = _slowest(self._throughput.work_seconds), time.monotonic()
        if slow is None or slow[0] != self._since[0]:
            self._since = (slow[0], now) if slow else (-1, math.inf)
            return
        rank, seconds, median = slow
        lasted = now - self._since[1]
        if lasted >= self.config.monitor.hang_seconds and rank not in self._named:
            self._named.add(rank)
            self._console.warn(
                f"{self._throughput.heartbeat.place(rank)} is slow: for {lasted:.0f} s it has taken {seconds:.3g} s a "
                f"step for its data and its passes, where half of the ranks take at most {median:.3g}; all wait for it"
            )
