"""Traces of single steps by torch.profiler, for TensorBoard's profile plugin and chrome://tracing."""

import sys
import warnings
from pathlib import Path

import torch

from cloze.launch.training.callbacks import Callback, RunView

FOLDER = "profile"


class StepProfiler(Callback):
    """Records steps `steps[0]` to `steps[1]` (from 0) of one rank into RUN/profile/; none if `steps` is empty."""

    def __init__(self, output: Path, steps: list[int], rank: int, device: torch.device) -> None:
        self._folder, self._steps, self._rank = output / FOLDER, steps, rank
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None

    @property
    def running(self) -> bool:
        """Whether a step is being recorded."""
        return self._profiler is not None

    def before_step(self, run: RunView) -> None:
        if self._steps and self._steps[0] <= run.state.step <= self._steps[1] and not self.running:
            handler = torch.profiler.tensorboard_trace_handler(
                str(self._folder), worker_name=f"rank-{self._rank:05d}", use_gzip=True
            )
            self._profiler = torch.profiler.profile(
                activities=self._activities, record_shapes=True, on_trace_ready=handler
            )
            start_quietly(self._profiler)

    def on_step(self, run: RunView) -> None:
        if self.running and run.state.step > self._steps[1]:
            self._close()

    def on_end(self, run: RunView, complete: bool) -> None:
        self._close()

    def _close(self) -> None:
        """Write the trace, if one is being recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def start_quietly(profiler: torch.profiler.profile) -> None:
    """Start a profiler without torch 2.12's warning that later cycles overwrite earlier ones, since there is only one;
    and without the compiler, which torch imports to see whether its code makes CUDA graphs. That takes as long as the
    import of torch itself, and what is not imported has compiled nothing.
    """
    lazy: set[str] = getattr(torch, "_lazy_modules", set())  # what torch imports when it is first asked for
    hidden = {"_inductor"} & lazy if "torch._inductor" not in sys.modules else set()
    lazy -= hidden
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            profiler.start()
    finally:
        lazy |= hidden
