"""Evaluation during training: losses and other means of an objective over validation samples."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cloze.launch.checkpoint.completion import ending, evaluated
from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device
from cloze.launch.training.callbacks import Callback, RunView, with_more
from cloze.launch.training.curves import Curves
from cloze.launch.training.objective import MeasuredObjective
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.launch.training.throughput import Throughput
from cloze.launch.training.weight_average import WeightAverage
from cloze.pipeline.fields import MicroBatch


@dataclass(frozen=True)
class ValidationSet:
    """Held-out samples of one folder.

    name: suffix of its curves, after a slash; None: the only set of the run's data. pooled: whether it counts in the
    values without a suffix. batches: makes an iterator of micro-batches, the same number on every rank.
    """

    name: str | None
    pooled: bool
    batches: Callable[[], Iterable[MicroBatch]]


@torch.no_grad()
def evaluate_sets(
    engine: Engine,
    objective: MeasuredObjective,
    sets: Sequence[ValidationSet],
    device: torch.device,
    beat: Callable[[], None],
) -> dict[str, float]:
    """`loss` and the objective's other measures by name: over all pooled sets, with equal weight for each token and
    each pair, and as `NAME/SET` for each named set. Collective.

    Args:
        beat: called after each micro-batch.
    """
    engine.model.eval()
    sums = torch.zeros(len(sets), len(objective.NAMES), dtype=torch.float64, device=device)
    # The counts of the whole set are known only at the end: means are computed from sums.
    ones = torch.ones(len(objective.TERMS), dtype=torch.float64, device=device)
    for row, measured_set in zip(sums, sets, strict=True):
        for micro_batch in measured_set.batches():
            micro_batch = to_device(micro_batch, device)
            row += objective(engine(**micro_batch), micro_batch, ones)[1]
            beat()
    engine.model.train()
    rows = distributed.reduce_sum(sums).tolist()
    pooled = [
        sum(column)
        for column in zip(
            *(row for row, measured_set in zip(rows, sets, strict=True) if measured_set.pooled), strict=True
        )
    ]
    measured = _means(objective, pooled)
    for row, measured_set in zip(rows, sets, strict=True):
        if measured_set.name is not None:
            measured |= {f"{name}/{measured_set.name}": value for name, value in _means(objective, row).items()}
    return measured


def _means(objective: MeasuredObjective, sums: list[float]) -> dict[str, float]:
    means = objective.scalars(sums)
    return {"loss": objective.total(means)} | means


Measure = Callable[[Callable[[], None]], dict[str, float]]
"""Measures the model on the validation data, on every rank alike: value by name. It calls its argument now and then, as
a sign of life."""


class Evaluations(Callback):
    """Measures the model every `evaluation.every_steps` steps, before the first step and at the end.

    Args:
        show: called with the step after each evaluation, on every rank: pictures and texts beside its numbers.
        average: of the weights, measured beside them.
        watchers: all that watch the run, whose `on_evaluation` adds scalars.
    """

    def __init__(
        self,
        config: RunConfig,
        measure: Measure,
        show: Callable[[int], None],
        average: WeightAverage | None,
        progress: TrainProgress,
        throughput: Throughput,
        curves: Curves,
        watchers: Sequence[Callback],
    ) -> None:
        super().__init__(config)
        self._measure, self._show, self._average = measure, show, average
        self._progress, self._throughput, self._curves = progress, throughput, curves
        self._watchers = watchers

    def on_start(self, run: RunView) -> None:
        self.on_step(run)  # also what a stop has left

    def on_step(self, run: RunView) -> None:
        step, every = run.state.step, self.config.evaluation.every_steps
        if ending(self.config.train, run.state):
            self._evaluate(run)
        elif (step == 0 or (every and step % every == 0)) and not run.stopping:  # a stop leaves little time
            self._evaluate(run)

    def _evaluate(self, run: RunView) -> None:
        """Measure, write the curves, and note in the state what the best is. Collective."""
        step = run.state.step
        if run.state.evaluated_step == step:
            return
        self._progress.settle()
        with self._throughput.pause(step, "evaluate"):
            beat = partial(self._throughput.heartbeat.beat, step, "evaluate")
            measured = self._measure(beat)
            if self._average:
                with self._average.in_place():
                    measured |= {f"ema_{name}": value for name, value in self._measure(beat).items()}
            scalars = {f"validation/{name}": value for name, value in measured.items()}
            scalars = self._as_measured_by_main(with_more(self._watchers, "on_evaluation", run, scalars), run)
            self._curves.write(self._progress.state, scalars)
            self._show(step)
        good_step = self._progress.good[0].step  # the weights are still those, if steps have been skipped since
        state = replace(self._progress.state, evaluated_step=step)
        self._progress.changed(evaluated(self.config.evaluation, state, scalars, good_step))

    def _as_measured_by_main(self, scalars: dict[str, float], run: RunView) -> dict[str, float]:
        """The scalars with rank 0's value of `evaluation.metric`. Collective.

        What ours measure is the same on all ranks; a callback's may not be, by a rounding or more, and what it decides
        (a save, the end of the run) all have to do together.
        """
        name = f"validation/{self.config.evaluation.metric}"
        if all(type(watcher).on_evaluation is Callback.on_evaluation for watcher in self._watchers):
            return scalars
        value = distributed.from_main(scalars.get(name, math.nan), run.device)
        return scalars | {name: value} if name in scalars else scalars
