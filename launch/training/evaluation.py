"""Means of an objective over validation samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from cloze.launch.engine.state import Engine
from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device
from cloze.launch.training.objective import MeasuredObjective


@dataclass(frozen=True)
class ValidationSet:
    """Held-out samples of one folder.

    name: behind a slash in its curves; None: it is the only one of the run's data, and stands for it. pooled: whether
    it counts in the values without a name. batches: makes an iterator of micro-batches, as many on every rank.
    """

    name: str | None
    pooled: bool
    batches: Callable[[], Iterable[dict]]


@torch.no_grad()
def evaluate(engine: Engine, objective: MeasuredObjective, batches: Callable[[], Iterable[dict]], device: torch.device,
             beat: Callable[[], None]) -> dict[str, float]:
    """`loss`, and whatever else the objective measures, by name. Collective.

    Args:
        batches: makes an iterator of micro-batches, as many on every rank.
        beat: called after each of them.
    """
    return evaluate_sets(engine, objective, [ValidationSet(None, True, batches)], device, beat)


@torch.no_grad()
def evaluate_sets(engine: Engine, objective: MeasuredObjective, sets: Sequence[ValidationSet], device: torch.device,
                  beat: Callable[[], None]) -> dict[str, float]:
    """`loss`, and whatever else the objective measures, by name: over all pooled sets, each token and each pair counted
    alike, and as `NAME/SET` of each set that has a name. Collective.

    Args:
        beat: called after each micro-batch.
    """
    engine.eval()
    sums = torch.zeros(len(sets), len(objective.NAMES), dtype=torch.float64, device=device)
    # The loss of a part needs the whole's counts, which only the end knows: means come from the sums.
    ones = torch.ones(len(objective.TERMS), dtype=torch.float64, device=device)
    for row, each in zip(sums, sets, strict=True):
        for micro_batch in each.batches():
            micro_batch = to_device(micro_batch, device)
            row += objective(engine(**micro_batch), micro_batch, ones)[1]
            beat()
    engine.train()
    rows = distributed.reduce_sum(sums).tolist()
    pooled = [sum(column) for column in zip(*(row for row, each in zip(rows, sets, strict=True) if each.pooled),
                                            strict=True)]
    measured = _means(objective, pooled)
    for row, each in zip(rows, sets, strict=True):
        if each.name is not None:
            measured |= {f"{name}/{each.name}": value for name, value in _means(objective, row).items()}
    return measured


def _means(objective: MeasuredObjective, sums: list[float]) -> dict[str, float]:
    means = objective.scalars(sums)
    return {"loss": objective.total(means)} | means
