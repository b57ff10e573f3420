"""`python -m tests.poisoned RANK STEPS pretrain …`: cloze, with a NaN loss on one rank at some steps (0,1,2 or 3-9)."""

import sys

from launch import trainer
from launch.cli import main


def poison(rank: int, steps: set[int]) -> None:
    """Multiply the loss by NaN: as an overflow in the middle of the model would."""
    accumulate = trainer.Trainer._accumulate

    def poisoned(self, micro_step, micro_batch, totals):
        if self.environment.rank == rank and self.state.step in steps and micro_step == 0:
            objective = self.objective
            self.objective = lambda *arguments: tuple(part * float("nan") for part in objective(*arguments))
            try:
                return accumulate(self, micro_step, micro_batch, totals)
            finally:
                self.objective = objective
        return accumulate(self, micro_step, micro_batch, totals)

    trainer.Trainer._accumulate = poisoned


if __name__ == "__main__":
    rank, steps, *arguments = sys.argv[1:]
    first, _, last = steps.partition("-")
    poison(int(rank), set(range(int(first), int(last) + 1)) if last else set(map(int, steps.split(","))))
    sys.exit(main(arguments))
