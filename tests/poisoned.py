"""Cloze with a NaN or an infinite loss on one rank at some steps."""

from collections.abc import Callable

from cloze.launch.training import trainer
from tests.slowed import slowed_main


def poisoned_main(rank: int, steps: range, slow_from: int, command: list[str]) -> int:
    """The command in a process whose loss is NaN; for `slow_from` see tests/slowed.py."""
    poison(rank, steps)
    return slowed_main(slow_from, command)


def infinite_main(rank: int, steps: range, slow_from: int, command: list[str]) -> int:
    """The same with a loss that is infinite, while its gradient is as finite as ever."""
    poison(rank, steps, lambda part: part + float("inf"))
    return slowed_main(slow_from, command)


class _Changed:
    """An objective whose losses and sums are changed; everything else is its own."""

    def __init__(self, objective, change: Callable) -> None:
        self._objective, self._change = objective, change

    def __call__(self, *arguments) -> tuple:
        return tuple(map(self._change, self._objective(*arguments)))

    def __getattr__(self, name: str):
        return getattr(self._objective, name)


def poison(rank: int, steps: range, change: Callable = lambda part: part * float("nan")) -> None:
    """Change the loss, to NaN if nothing else is said: as an overflow in the middle of the model would."""
    accumulate = trainer.Trainer._accumulate

    def poisoned(self, micro_step, micro_batch, totals, *seen):
        if self.environment.rank == rank and self.state.step in steps and micro_step == 0:
            objective = self.objective
            self.objective = _Changed(objective, change)
            try:
                return accumulate(self, micro_step, micro_batch, totals, *seen)
            finally:
                self.objective = objective
        return accumulate(self, micro_step, micro_batch, totals, *seen)

    trainer.Trainer._accumulate = poisoned
