"""`cloze finetune`, altered as a test needs it; here since a forked process whose function is in the test's own file
imports what that imports, transformers first of all.
"""

import itertools
import os
import signal
from pathlib import Path

import torch

from cloze.launch.cli import main
from cloze.launch.run import runs
from cloze.launch.system.environment.process import fewer_imports

with fewer_imports():
    from cloze.launch.finetune import reporting
    from cloze.launch.finetune.contrastive import ContrastiveObjective
    from cloze.launch.training import process as training_process


def stopped_at_the_report(command: list[str]) -> int:
    save = reporting.save_model

    def stopping(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    reporting.save_model = stopping
    return main(command)


def fails_in_the_report(command: list[str]) -> int:
    def failing(*_):
        raise RuntimeError("nothing left")

    reporting.save_model = failing
    return main(command)


def damaged_at_the_end(name: str, command: list[str]) -> int:
    """One of its files holds zeros, as many as before, when only the last looks are left."""
    look, calls = training_process.describe_again, itertools.count()

    def describe_again(run: Path, *others) -> None:
        path = run / name
        if next(calls) or name == runs.CONFIG:  # the first is before the run's last work
            path.write_bytes(bytes(path.stat().st_size)) if name.startswith(runs.MODEL) else path.unlink()
        look(run, *others)

    training_process.describe_again = describe_again
    return main(command)


def exact_passes(words: list[str]) -> int:
    """`cloze`, with a second pass whose vectors must be those of the first, bit for bit."""
    seen = []
    observe, call = ContrastiveObjective.observe, ContrastiveObjective.__call__

    def observing(self, outputs, totals):
        seen[:] = [output.vectors.clone() for output in outputs]
        assert len(outputs) == 2 and not any(output.vectors.requires_grad for output in outputs)
        observe(self, outputs, totals)

    def calling(self, output, micro_batch, totals):
        assert torch.equal(output.vectors, seen.pop(0)) and output.vectors.requires_grad
        left, right = output.vectors.unflatten(0, (-1, 2)).unbind(1)
        assert (left - right).abs().amax(1).min() > 1e-3  # the same text, dropped differently
        return call(self, output, micro_batch, totals)

    ContrastiveObjective.observe, ContrastiveObjective.__call__ = observing, calling
    return main(words)
