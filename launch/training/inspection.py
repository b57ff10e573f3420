"""Inspection of single steps: norms of gradient, weight and update of each layer, and the share of communication;
traces by torch.profiler, for TensorBoard's profile plugin and chrome://tracing.
"""

import contextlib
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Engine, Outcome, Parts
from cloze.launch.system import distributed
from cloze.launch.training.callbacks import Callback, RunView
from cloze.launch.training.curves import Curves

FOLDER = "profile"  # of a run, for traces
# What the names that torch.profiler gives to gloo's collectives begin with.
_COMMUNICATION = "gloo:"


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


def layer_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to: embeddings, layer_00 to layer_NN, or head."""
    if match := re.search(r"\blayers?\.(\d+)\.", parameter):
        return f"layer_{int(match[1]):02d}"
    return "embeddings" if "embeddings" in parameter else "head"


class Inspector(Callback):
    """Measures every `every_steps`th optimizer step: each process measures its own fragments of the master weights,
    followed by one reduction.

    The norms are those of the fp32 master weights and of the gradients before clipping.

    Args:
        curves: takes the measures.
        profiler: no step is measured while it records, since torch has one profiler.
    """

    def __init__(
        self, engine: Engine, config: RunConfig, world_size: int, curves: Curves, profiler: StepProfiler
    ) -> None:
        self._engine, self._world_size, self._curves, self._profiler = engine, world_size, curves, profiler
        self._every_steps = config.monitor.inspect_every_steps
        self._clipping = config.train.gradient_clipping
        self._device = engine.device
        self._watching: contextlib.ExitStack | None = None
        self._squares: dict[str, torch.Tensor] = {}  # of gradient, weight and update, by layer
        self._weights: list[torch.Tensor] = []  # before the update
        # On a GPU only on request (monitor.profile_steps): starting a profiler waits for the device, and CUPTI, which
        # observes kernels for it, may slow down every later step (pytorch#144455).
        self._times_communication = world_size > 1 and engine.device.type == "cpu"
        self._communication_share = 0.0

    def before_step(self, run: RunView) -> None:
        """Begin to watch the step, if it is one that is measured."""
        every = self._every_steps
        if not every or (run.state.step + 1) % every or self._profiler.running:
            return
        names = {layer_of(name) for name, _ in self._engine.model.named_parameters()}
        self._squares = {layer: torch.zeros(3, dtype=torch.float64, device=self._device) for layer in sorted(names)}
        self._watching = contextlib.ExitStack()
        if self._times_communication:
            self._watching.enter_context(self._timed_communication())
        self._watching.enter_context(self._engine.watch_update(self._before, self._after))

    def on_step(self, run: RunView) -> None:
        """Write the measures. Collective."""
        if self._watching is not None:
            self._watching.close()
            self._watching = None
            assert run.outcome is not None, "a step was made"
            self._curves.write(run.state, self._scalars(run.outcome), progress=False)

    def _scalars(self, outcome: Outcome) -> dict[str, float]:
        """Scalars by layer: gradient_norm, weight_norm, update_ratio (update norm / weight norm). Collective."""
        squares = distributed.reduce_sum(torch.stack(list(self._squares.values())))
        if self._engine.stage == 0:
            squares = squares / self._world_size  # every process has counted whole tensors
        scalars = {}
        if self._times_communication:
            scalars["speed/communication_share"] = self._communication_share
        norm = float(outcome.gradient_norm)
        if not math.isfinite(norm):  # the step was skipped
            return scalars
        # The factor by which clipping has scaled the gradients.
        clipped = min(1.0, self._clipping / (norm + 1e-6)) if self._clipping else 1.0
        for layer, (gradient, weight, update) in zip(self._squares, squares.sqrt().tolist(), strict=True):
            scalars[f"gradient_norm/{layer}"] = gradient / clipped
            scalars[f"weight_norm/{layer}"] = weight
            scalars[f"update_ratio/{layer}"] = update / weight if weight else 0.0
        return scalars

    def _before(self, parts: Parts) -> None:
        # The activations are freed by now: the copy does not raise the peak memory.
        self._weights = []
        for name, weight, gradient in parts:
            self._weights.append(weight.clone())
            squares = torch.stack([gradient.double().square().sum(), weight.double().square().sum()])
            self._squares[layer_of(name)][:2] += squares.to(self._device)

    def _after(self, parts: Parts) -> None:
        for (name, weight, _), before in zip(parts, self._weights, strict=True):
            self._squares[layer_of(name)][2] += (weight - before).double().square().sum().to(self._device)
        self._weights = []

    @contextlib.contextmanager
    def _timed_communication(self) -> Iterator[None]:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        start_quietly(profiler)
        try:
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
        finally:
            profiler.stop()
        results: Any = profiler.profiler
        # The raw events: converting them by `profiler.events()` takes longer than a small model's step.
        spans = [
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in results.kineto_results.events()
            if event.name().startswith(_COMMUNICATION)
        ]
        self._communication_share = _covered(spans) / 1e9 / seconds


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
