"""Names a rank that is far slower than the others for a long time."""

import math
import time
from collections.abc import Mapping

import torch

from cloze.launch.config import RunConfig
from cloze.launch.system.console import Console
from cloze.launch.training.callbacks import Callback, RunView
from cloze.launch.training.throughput import Throughput

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
