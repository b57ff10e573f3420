"""Run fine-tuning commands in fresh processes that need not import for seconds: DeepSpeed serves one run a process."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.finetuning.small import QUICK
from tests.forkserver import FORKSERVER
from tests.launching import finish, start


def command(task, model, train, validation, output, *overrides, processes: int = 1) -> list[str]:
    """The command of a run, through torchrun if it has several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "launch", "finetune", task, "--model",
            str(model), "--train", str(train), "--validation", str(validation), "--output", str(output), *QUICK,
            *map(str, overrides)]


def finetune(task, model, train, validation, output, *overrides, processes: int = 1) -> tuple[dict, str]:
    """Run to the end; returns the results and what was printed."""
    words = command(task, model, train, validation, output, *overrides, processes=processes)
    said = finish(start(words, OMP_NUM_THREADS="1")) if processes > 1 else in_fresh_process(words)
    return json.loads((Path(output) / "results.json").read_text()), said


def in_fresh_process(words: list[str], status: int = 0, before: Callable[[], None] | None = None) -> str:
    """Run a command of one process, in which `before` is called first; returns what was printed."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        child = FORKSERVER.Process(target=_run, args=(words[words.index("finetune"):], log.name, before))
        child.start()
        child.join(300)
        said = Path(log.name).read_text()
    assert child.exitcode == status, f"status {child.exitcode}: {said[-4000:]}"
    return said


def _run(words: list[str], log: str, before: Callable[[], None] | None) -> None:
    import torch

    from launch.cli import main

    torch.set_num_threads(1)
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if before:
            before()
        status = main(words)
    sys.exit(status)


def lines(path: Path) -> list[dict]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
