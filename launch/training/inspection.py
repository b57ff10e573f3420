"""Inspection of single steps: norms of gradient, weight and update of each layer, and the share of communication."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from cloze.launch.engine.state import Engine, base_optimizer, master_fragments
from cloze.launch.system import distributed
from cloze.launch.training.profiling import start_quietly

# Names that torch.profiler gives to collectives: gloo's on the host, NCCL's kernels on the device.
_COMMUNICATION = ("gloo:", "ncclDevKernel", "ncclKernel")


def layer_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to: embeddings, layer_00 to layer_NN, or head."""
    if match := re.search(r"\blayers?\.(\d+)\.", parameter):
        return f"layer_{int(match[1]):02d}"
    return "embeddings" if "embeddings" in parameter else "head"


class Inspector:
    """Measures an optimizer step: each process measures its own fragments of the master weights, followed by one
    reduction.

    The norms are those of the fp32 master weights and of the gradients as the optimizer gets them, before clipping.
    """

    def __init__(self, engine: Engine, device: torch.device, world_size: int) -> None:
        self._engine, self._device, self._world_size = engine, device, world_size
        self._fragments: dict[int, list[tuple[str, int, int]]] | None = None
        self._squares: dict[str, torch.Tensor] = {}
        self._weights: list[torch.Tensor] = []  # before the update
        self._communication_share = 0.0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Context for the last micro-step of a batch, with its reductions and its update."""
        if self._fragments is None:
            self._fragments = self._locate()
        self._squares = {
            layer: torch.zeros(3, dtype=torch.float64, device=self._device)
            for layer in sorted({layer_of(name) for name, _ in self._engine.module.named_parameters()})
        }
        optimizer = base_optimizer(self._engine)
        hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        try:
            with self._timed_communication():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def scalars(self) -> dict[str, float]:
        """For the watched step, by layer: gradient_norm, weight_norm, update_ratio (update norm / weight norm).
        Collective.
        """
        squares = distributed.reduce_sum(torch.stack(list(self._squares.values())))
        if not self._engine.zero_optimization():
            squares = squares / self._world_size  # every process has counted whole tensors
        scalars = {}
        if self._world_size > 1:
            scalars["speed/communication_share"] = self._communication_share
        norm, limit = float(self._engine.get_global_grad_norm() or 0.0), self._engine.gradient_clipping()
        if not math.isfinite(norm):  # the step was skipped
            return scalars
        # The factor by which clipping has scaled the gradients.
        clipped = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for layer, (gradient, weight, update) in zip(self._squares, squares.sqrt().tolist(), strict=True):
            scalars[f"gradient_norm/{layer}"] = gradient / clipped
            scalars[f"weight_norm/{layer}"] = weight
            scalars[f"update_ratio/{layer}"] = update / weight if weight else 0.0
        return scalars

    def _locate(self) -> dict[int, list[tuple[str, int, int]]]:
        """Layer, offset and length of every fragment on this process, by the storage that contains it."""
        found: dict[int, list[tuple[str, int, int]]] = {}
        for name, _, tensor in master_fragments(self._engine):
            place = tensor.untyped_storage().data_ptr()
            found.setdefault(place, []).append((layer_of(name), int(tensor.storage_offset()), tensor.numel()))
        return found

    def _parts(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Layer, weight and gradient of every fragment that the optimizer is about to change, or has changed."""
        assert self._fragments is not None, "`watch` has found them"
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                weight, gradient = tensor.detach().flatten(), tensor.grad.flatten()
                # A process's part of a small group may be only padding.
                for layer, start, length in self._fragments.get(tensor.untyped_storage().data_ptr(), ()):
                    start -= tensor.storage_offset()
                    yield layer, weight[start : start + length], gradient[start : start + length]

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # The activations are freed by now: the copy does not raise the peak memory.
        self._weights = []
        for layer, weight, gradient in self._parts(optimizer):
            self._weights.append(weight.clone())
            squares = torch.stack([gradient.double().square().sum(), weight.double().square().sum()])
            self._squares[layer][:2] += squares.to(self._device)

    def _after(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        for (layer, weight, _), before in zip(self._parts(optimizer), self._weights, strict=True):
            self._squares[layer][2] += (weight - before).double().square().sum().to(self._device)
        self._weights = []

    @contextlib.contextmanager
    def _timed_communication(self) -> Iterator[None]:
        if self._world_size == 1:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        start_quietly(profiler)
        try:
            began = time.perf_counter()
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize()
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
