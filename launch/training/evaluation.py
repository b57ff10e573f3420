"""Evaluation during training: losses and other means of an objective over validation samples."""

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

    name: suffix of its curves, after a slash; None: the only set of the run's data. pooled: whether it counts in the
    values without a suffix. batches: makes an iterator of micro-batches, the same number on every rank.
    """

    name: str | None
    pooled: bool
    batches: Callable[[], Iterable[dict]]


@torch.no_grad()
def evaluate(
    engine: Engine,
    objective: MeasuredObjective,
    batches: Callable[[], Iterable[dict]],
    device: torch.device,
    beat: Callable[[], None],
) -> dict[str, float]:
    """`loss` and the objective's other measures by name. Collective.

    Args:
        batches: makes an iterator of micro-batches, the same number on every rank.
        beat: called after each micro-batch.
    """
    return evaluate_sets(engine, objective, [ValidationSet(None, True, batches)], device, beat)


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
    engine.eval()
    sums = torch.zeros(len(sets), len(objective.NAMES), dtype=torch.float64, device=device)
    # The counts of the whole set are known only at the end: means are computed from sums.
    ones = torch.ones(len(objective.TERMS), dtype=torch.float64, device=device)
    for row, each in zip(sums, sets, strict=True):
        for micro_batch in each.batches():
            micro_batch = to_device(micro_batch, device)
            row += objective(engine(**micro_batch), micro_batch, ones)[1]
            beat()
    engine.train()
    rows = distributed.reduce_sum(sums).tolist()
    pooled = [
        sum(column) for column in zip(*(row for row, each in zip(rows, sets, strict=True) if each.pooled), strict=True)
    ]
    measured = _means(objective, pooled)
    for row, each in zip(rows, sets, strict=True):
        if each.name is not None:
            measured |= {f"{name}/{each.name}": value for name, value in _means(objective, row).items()}
    return measured


def _means(objective: MeasuredObjective, sums: list[float]) -> dict[str, float]:
    means = objective.scalars(sums)
    return {"loss": objective.total(means)} | means
