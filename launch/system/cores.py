"""Processor cores that this process may use, as the operating system and the container allow."""

import os
from collections.abc import Iterator
from pathlib import Path

from cloze.launch.system.memory import group_folders


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those of its affinity, or fewer by the time that its control groups give
    it. A limit of 2.5 cores counts as 2: with more threads than the limit all of them pause together.
    """
    # macOS has no sched_getaffinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(limit) for limit in _limits(root))]))


def _limits(root: Path) -> Iterator[float]:
    """The limit of each control group around this process, in cores: its time in each period."""
    for controllers, folder in group_folders(root):
        if "cpu" in controllers and (quota := folder / "cpu.cfs_quota_us").is_file():
            time, period = int(quota.read_text()), int((folder / "cpu.cfs_period_us").read_text())
            if time > 0:  # -1: no limit
                yield time / period
        elif controllers == [""] and (limit := folder / "cpu.max").is_file():
            given, period_text = limit.read_text().split()
            if given != "max":
                yield int(given) / int(period_text)
