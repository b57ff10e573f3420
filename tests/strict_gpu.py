"""Cloze on a GPU for which no host may wait inside a step after which nothing is logged or saved: whatever does
raises. `poisoned`: steps 3 and 4 are NaN.

python -m tests.strict_gpu [poisoned] pretrain --data ...
"""

from __future__ import annotations

import sys

import torch

from cloze.launch import cli
from cloze.launch.training import loop
from tests.poisoned import poison

WARM_STEPS = 2  # optimizers make their states, cuBLAS its buffers, the allocator its first blocks


def main(command: list[str]) -> int:
    """Run a command of `cloze`; afterwards it says how often memory had to be given back and asked for anew."""
    if command[0] == "poisoned":
        command = command[1:]
        poison(0, range(3, 5))
    make_step = loop.Loop.step

    def strict(self, stream) -> None:
        number, train = self.progress.state.step + 1, self.config.train
        due = number % train.log_every_steps == 0 or number == train.max_steps
        torch.cuda.set_sync_debug_mode("default" if number <= WARM_STEPS or due else "error")
        try:
            make_step(self, stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    loop.Loop.step = strict
    status = cli.main(command)
    print(f"allocator retries: {torch.cuda.memory_stats()['num_alloc_retries']}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
