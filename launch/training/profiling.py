"""Traces of single steps by torch.profiler, for TensorBoard's profile plugin and chrome://tracing."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

FOLDER = "profile"


class StepProfiler:
    """Records the steps from `steps[0]` to `steps[1]` of one rank into RUN/profile/; does nothing if `steps` is
    empty.
    """

    def __init__(self, run: Path, steps: list[int], rank: int, device: torch.device) -> None:
        self._folder, self._steps, self._rank = run / FOLDER, steps, rank
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None

    @property
    def running(self) -> bool:
        return self._profiler is not None

    def before(self, step: int) -> None:
        """Call before the optimizer step number `step` (from 0)."""
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self.running:
            handler = torch.profiler.tensorboard_trace_handler(
                str(self._folder), worker_name=f"rank-{self._rank:05d}", use_gzip=True
            )
            self._profiler = torch.profiler.profile(
                activities=self._activities, record_shapes=True, on_trace_ready=handler
            )
            start_quietly(self._profiler)

    def after(self, step: int) -> None:
        """Call after the optimizer step number `step`."""
        if self.running and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is being recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def start_quietly(profiler: torch.profiler.profile) -> None:
    """Start a profiler without torch 2.12's warning that later cycles overwrite earlier ones: there is only one
    cycle.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler.start()
