"""An objective's means over held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from cloze.launch.system import distributed
from cloze.launch.system.devices import to_device


@torch.no_grad()
def evaluate(engine, objective, batches: Callable[[], Iterable[dict]], device: torch.device,
             beat: Callable[[], None]) -> dict[str, float]:
    """`loss`, and whatever else the objective measures, by name. Collective.

    Args:
        batches: makes an iterator of micro-batches, as many on every rank.
        beat: called after each of them.
    """
    engine.eval()
    sums = torch.zeros(len(objective.NAMES), dtype=torch.float64, device=device)
    # The loss of a part needs the whole's counts, which only the end knows: means come from the sums.
    ones = torch.ones(len(objective.TERMS), dtype=torch.float64, device=device)
    for micro_batch in batches():
        micro_batch = to_device(micro_batch, device)
        sums += objective(engine(**micro_batch), micro_batch, ones)[1]
        beat()
    engine.train()
    means = objective.scalars(distributed.reduce_sum(sums).tolist())
    return {"loss": objective.total(means)} | means
