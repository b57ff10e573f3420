"""Cloze with a NaN or an infinite loss on one rank at some steps."""

from collections.abc import Callable

from cloze.launch.cli import main
from cloze.launch.training import loop


def poisoned_main(rank: int, steps: range, command: list[str]) -> int:
    """The command in a process whose loss is NaN."""
    poison(rank, steps)
    return main(command)


def infinite_main(rank: int, steps: range, command: list[str]) -> int:
    """The same with a loss that is infinite, while its gradient is as finite as ever."""
    poison(rank, steps, lambda part: part + float("inf"))
    return main(command)


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
    loss = loop.Loop._loss

    def poisoned(self, batch, number, *arguments):
        if self.environment.rank == rank and self.progress.state.step in steps and number == 0:
            objective = self.objective
            self.objective = _Changed(objective, change)
            try:
                return loss(self, batch, number, *arguments)
            finally:
                self.objective = objective
        return loss(self, batch, number, *arguments)

    loop.Loop._loss = poisoned
