"""Average of the weights, exponential (EMA) or of the last steps, kept beside the trained ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cloze.launch.checkpoint.weight_averages import (
    Coverage,
    Parts,
    average_content,
    average_file,
    has_average,
    read_parts,
)
from cloze.launch.config import EmaConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.system import distributed
from cloze.launch.training.callbacks import Callback, RunView
from cloze.pipeline.fields import Fields


class WeightAverage(Callback):
    """After each step average = decay × average + (1 - decay) × weights, in fp32, of the optimizer's masters.

    Each process keeps the average of the weights that it updates: at `zero.stage` 0 of all, above of its part.

    Args:
        config: `wanted`. With `decay` and `warmup` the decay of step n is at most (1 + n) / (10 + n), as in
            tf.train.ExponentialMovingAverage, so that the random initial weights soon have no influence. With
            `tail_share` the decay of the k-th of the last steps is 1 - 1/k, which makes the plain mean of their
            weights (Polyak and Ruppert), and 0 before them.
        steps: of the whole run.
    """

    def __init__(self, engine: Engine, config: EmaConfig, steps: int, rank: int) -> None:
        assert config.wanted
        self._engine, self._config, self._rank = engine, config, rank
        self._tail_begins = steps - max(1, round((config.tail_share or 0) * steps))
        self._starts: dict[str, int] = {}
        self._masters: list[torch.Tensor] = []
        self._averages: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Start the average from the current weights, unless it has begun."""
        if self._averages:
            return
        sizes = {name: getattr(each, "ds_numel", each.numel()) for name, each in self._engine.model.named_parameters()}
        for fragment in self._engine.fragments():
            name, start = fragment.name, fragment.start
            part = fragment.values.flatten()[: max(0, sizes[name] - start)]  # at stage 3 the last may end in padding
            if len(part):
                self._masters.append(part)
                self._starts[name], self._averages[name] = start, part.float().clone()

    def load(self, folder: Path, alike: bool) -> bool:
        """Load the average of a checkpoint. If it has none, start from the current weights and return False.

        Args:
            alike: whether it was saved at this world size and stage, so that this rank's file has all that it needs.

        Raises:
            OtherContent: the checkpoint's average is not one of this model.
        """
        self.begin()
        if not has_average(folder):
            return False
        covered = Coverage({name: len(own) for name, own in self._averages.items()})
        for name, start, part in read_parts(folder, self._rank if alike else None):
            if name not in self._averages:
                continue
            own, begin = self._averages[name], self._starts[name]
            low, high = max(start, begin), min(start + len(part), begin + len(own))
            if low < high:
                own[low - begin : high - begin] = part[low - start : high - start].to(own.device)
                covered.add(name, low - begin, high - begin)
        covered.check(self._averages)
        return True

    def on_start(self, run: RunView) -> None:
        self.begin()

    def on_step(self, run: RunView) -> None:
        assert run.outcome is not None, "a step was made"
        self.update(run.state.step, run.outcome.skipped)

    def update(self, step: int, skipped: torch.Tensor) -> None:
        """Update the average with the weights after a step.

        Args:
            step: steps made, including this one.
            skipped: float64 (1,), 1 for an overflow step, which changed nothing; the host does not wait for it.
        """
        if not self._masters:
            return
        decay = self._decay(step)
        weight = ((1 - decay) * (1 - skipped)).float()[0].to(self._masters[0].device)
        averages = list(self._averages.values())
        differences = torch._foreach_sub(self._masters, averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)

    def _decay(self, step: int) -> float:
        if self._config.decay is None:
            return 1 - 1 / max(1, step - self._tail_begins)
        return min(self._config.decay, (1 + step) / (10 + step)) if self._config.warmup else self._config.decay

    def files(self) -> dict[str, Fields]:
        """Contents of the files that this process adds to a checkpoint, by file name."""
        sharded = self._engine.stage > 0
        if self._rank and not sharded:
            return {}
        parts: Parts = {name: (self._starts[name], average) for name, average in self._averages.items()}
        module = self._engine.model
        first: dict[int, str] = {}
        tied = {
            name: first[id(each)]
            for name, each in module.named_parameters(remove_duplicate=False)
            if first.setdefault(id(each), name) != name
        }
        frozen = [name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad]
        return {average_file(self._rank if sharded else None): average_content(parts, tied, frozen)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the engine's model has the averages as its weights; afterwards it has its own again, bit for
        bit. Collective; at stage 3 the forwards within are collective too.
        """
        parameters = {name: each for name, each in self._engine.model.named_parameters() if each.requires_grad}
        kept = {} if self._engine.stage == 3 else {name: each.detach().clone() for name, each in parameters.items()}
        self._put(parameters, self._averages)
        try:
            yield
        finally:
            # DeepSpeed makes the partitioned weights from its master weights after each step.
            if self._engine.stage == 3:
                self._put(parameters, dict(zip(self._averages, self._masters, strict=True)))
            with torch.no_grad():
                for name, before in kept.items():
                    parameters[name].copy_(before)

    def _put(self, parameters: dict[str, torch.nn.Parameter], parts: dict[str, torch.Tensor]) -> None:
        """Set the parameters to the values whose parts are distributed over the processes."""
        for name, parameter in parameters.items():
            whole = torch.zeros(getattr(parameter, "ds_numel", parameter.numel()), device=self._engine.device)
            if name in parts:
                start = self._starts[name]
                whole[start : start + len(parts[name])] = parts[name]
            if self._engine.stage:
                distributed.reduce_sum(whole)  # a sum of parts that do not overlap
            self._engine.set_parameter(parameter, whole)
