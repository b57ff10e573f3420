"""Cloze with steps that take long from some step on: who comes late to kill or stop the run still finds it at work."""

import time
from collections.abc import Callable
from functools import partial

from cloze.launch import cli
from cloze.launch.system.environment.process import fewer_imports

with fewer_imports():
    from cloze.launch.training import loop

SECONDS = 0.5  # for each process of each step


def slowed_main(step: int, main: Callable[[list[str]], int], command: list[str]) -> int:
    """The command in a process that is slow from that step on."""
    make_step = loop.Loop.step

    def slowed(self, *arguments):
        if self.progress.state.step >= step:
            time.sleep(SECONDS)
        make_step(self, *arguments)

    loop.Loop.step = slowed
    return main(command)


def slow_from(step: int, main: Callable[[list[str]], int] = cli.main) -> Callable[[list[str]], int]:
    """What ForkedRun calls for such a process.

    Args:
        main: what is called with the command, as a test has changed it.
    """
    return partial(slowed_main, step, main)
