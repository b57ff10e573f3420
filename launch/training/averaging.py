"""Exponential moving average of the weights (EMA), kept beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cloze.launch.checkpoint.averages import Parts, average_content, average_file, has_average, read_parts
from cloze.launch.engine.state import Engine, master_fragments, set_parameter
from cloze.launch.system import distributed


class WeightAverage:
    """After each step average = decay × average + (1 - decay) × weights, in fp32, of the optimizer's masters.

    Each process keeps the parts that it updates: at `zero.stage` 0 all, above a share.

    Args:
        decay: 0 to below 1.
        warmup: whether the decay of step n is at most (1 + n) / (10 + n), as in tf.train.ExponentialMovingAverage, so
            that drawn weights are soon forgotten.
    """

    def __init__(self, engine: Engine, decay: float, warmup: bool) -> None:
        self._engine, self._decay, self._warmup = engine, decay, warmup
        self._starts: dict[str, int] = {}
        self._masters: list[torch.Tensor] = []
        self._averages: dict[str, torch.Tensor] = {}

    @property
    def _stage(self) -> int:
        return self._engine.zero_optimization_stage()

    def begin(self) -> None:
        """Start from the weights as they are, unless it has begun."""
        if self._averages:
            return
        sizes = {name: getattr(each, "ds_numel", each.numel()) for name, each in self._engine.module.named_parameters()}
        for name, start, fragment in master_fragments(self._engine):
            part = fragment.flatten()[:max(0, sizes[name] - start)]  # at stage 3 the last may end in padding
            if len(part):
                self._masters.append(part)
                self._starts[name], self._averages[name] = start, part.float().clone()

    def load(self, folder: Path, rank: int | None) -> bool:
        """Go on from a checkpoint's average; False, and from the weights as they are, if it holds none.

        Args:
            rank: of this process; None: another number of processes has saved it.
        """
        self.begin()
        if not has_average(folder):
            return False
        for name, start, part in read_parts(folder, rank):
            if name not in self._averages:
                continue
            own, begin = self._averages[name], self._starts[name]
            low, high = max(start, begin), min(start + len(part), begin + len(own))
            if low < high:
                own[low - begin:high - begin] = part[low - start:high - start].to(own.device)
        return True

    def update(self, step: int, skipped: torch.Tensor) -> None:
        """Take the weights after a step in.

        Args:
            step: steps made, this one among them.
            skipped: float64 (1,), 1 if it has changed nothing, which no host waits for.
        """
        if not self._masters:
            return
        decay = min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay
        weight = ((1 - decay) * (1 - skipped)).float()[0].to(self._masters[0].device)
        averages = list(self._averages.values())
        differences = torch._foreach_sub(self._masters, averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)

    def files(self, rank: int) -> dict[str, dict]:
        """What this process adds to a checkpoint, by the names of files."""
        sharded = self._stage > 0
        if rank and not sharded:
            return {}
        parts: Parts = {name: (self._starts[name], average) for name, average in self._averages.items()}
        module = self._engine.module
        first: dict[int, str] = {}
        tied = {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)
                if first.setdefault(id(each), name) != name}
        return {average_file(rank if sharded else None): average_content(parts, tied)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The engine's model has the averages for its weights within, and its own ones behind, bit for bit. Collective,
        also within at stage 3.
        """
        parameters = {name: each for name, each in self._engine.module.named_parameters() if each.requires_grad}
        kept = {} if self._stage == 3 else {name: each.detach().clone() for name, each in parameters.items()}
        self._put(parameters, self._averages)
        try:
            yield
        finally:
            if self._stage == 3:  # what DeepSpeed partitions is what it makes of its masters after each step
                self._put(parameters, dict(zip(self._averages, self._masters, strict=True)))
            with torch.no_grad():
                for name, before in kept.items():
                    parameters[name].copy_(before)

    def _put(self, parameters: dict[str, torch.nn.Parameter], parts: dict[str, torch.Tensor]) -> None:
        """Give the parameters the values of which each process has its parts."""
        for name, parameter in parameters.items():
            whole = torch.zeros(getattr(parameter, "ds_numel", parameter.numel()), device=self._engine.device)
            if name in parts:
                start = self._starts[name]
                whole[start:start + len(parts[name])] = parts[name]
            if self._stage:
                distributed.reduce_sum(whole)  # of parts that do not overlap
            set_parameter(self._engine, parameter, whole)
