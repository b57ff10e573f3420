"""Start real training processes, watch them, kill them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from cloze.launch import cli
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.runs import METRICS
from cloze.launch.system.environment.launchers import child_variables
from cloze.launch.system.environment.process import fewer_imports
from tests.forked import ForkedRun
from tests.slowed import slow_from

with fewer_imports():
    from cloze.launch.checkpoint.weights import read_weights

ROOT = Path(__file__).resolve().parent.parent

# A run as its launcher sees it: torchrun or python itself, or what forks its processes.
Process = subprocess.Popen | ForkedRun
# What takes so long hangs, whatever else the machine does.
PATIENCE_SECONDS = 300
# A model that takes a few milliseconds a step, with all that a real one has.
TINY = (
    "--model.hidden_size",
    "32",
    "--model.num_hidden_layers",
    "2",
    "--model.num_attention_heads",
    "2",
    "--model.intermediate_size",
    "64",
    "--model.max_position_embeddings",
    "32",
    "--train.global_batch_size",
    "16",
    "--train.micro_batch_size",
    "4",
    "--train.learning_rate",
    "3e-3",
    "--train.precision",
    "fp32",
    "--train.log_every_steps",
    "1",
    "--evaluation.every_steps",
    "0",
)
NO_DROPOUT = ("--model.hidden_dropout_prob", "0", "--model.attention_probs_dropout_prob", "0")


def pretrain_arguments(data: Path | str, output: Path, *overrides: str) -> list[str]:
    """What follows `cloze` on the command line of a run."""
    return ["pretrain", *TINY, "--data", str(data), "--output", str(output), *overrides]


CLOZE = ("-m", "cloze")


def pretrain_command(
    data: Path, output: Path, *overrides: str, processes: int = 1, program: tuple[str, ...] = CLOZE
) -> list[str]:
    """The command of a run, through torchrun as on a cluster; one process alone needs none.

    Args:
        program: what is started; a script that a test has written needs PYTHONPATH.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [
        sys.executable,
        *(launcher if processes > 1 else []),
        *program,
        *pretrain_arguments(data, output, *overrides),
    ]


def start(command: list[str], **variables: str) -> subprocess.Popen:
    """Start a command, with further environment variables."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_variables(PYTHONUNBUFFERED="1", **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def children(pid: int) -> list[int]:
    """Processes that a process has started; none if it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill_all(process: Process, number: int = signal.SIGKILL) -> None:
    """Send a signal to a command and all that it has started: torchrun gives each rank a process group of its own."""
    found = [process.pid]
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # it starts none meanwhile
    for pid in found:
        found += children(pid)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)


def finish(process: Process, status: int | None = 0, patience_seconds: float = PATIENCE_SECONDS) -> str:
    """Wait for the end, check the exit status and return what was printed."""
    try:
        output, _ = process.communicate(timeout=patience_seconds)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise
    assert status is None or process.returncode == status, f"status {process.returncode}:\n{output[-4000:]}"
    return output


def train(data: Path, output: Path, *overrides: str, processes: int = 1, status: int | None = 0) -> str:
    """Run to the end, in processes that are forked."""
    return finish(ForkedRun(pretrain_arguments(data, output, *overrides), processes), status)


def kill_when(process: Process, reached: Callable[[], bool]) -> None:
    """SIGKILL every process of the run, at once, as soon as `reached`; the run must not have ended before."""
    deadline, came = time.monotonic() + PATIENCE_SECONDS, False
    try:
        while process.poll() is None and time.monotonic() < deadline and not (came := reached()):
            time.sleep(0.002)
    finally:
        kill_all(process)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert came, f"the moment to kill did not come; status {process.returncode}:\n{output[-4000:]}"
    assert "complete at step" not in output, "outlived its death"


def kill_at(
    step: int,
    command: list[str],
    processes: int = 1,
    main: Callable[[list[str]], int] = cli.main,
    compiler: bool | None = None,
    checkpoints: int = 1,
) -> Path:
    """Start a run and SIGKILL all of it behind a step, when it has so many checkpoints; returns its folder.

    Args:
        command, processes, main, compiler: see ForkedRun; from this step on a step takes long.
    """
    run = Path(command[command.index("--output") + 1])
    killed = ForkedRun(command, processes, slow_from(step, main), compiler)
    kill_when(killed, lambda: step_of(run) >= step and len(saved(run)) >= checkpoints)
    return run


def resume(
    command: list[str],
    processes: int = 1,
    main: Callable[[list[str]], int] = cli.main,
    compiler: bool | None = None,
) -> str:
    """Start a run again, which goes on from a checkpoint to its end; returns what was printed."""
    output = finish(ForkedRun(command, processes, main, compiler))
    assert "resumed from step" in output, "it began anew, and would end with the same bits too"
    return output


def assert_killed_equals_whole(
    whole: Path,
    step: int,
    command: list[str],
    processes: int = 1,
    main: Callable[[list[str]], int] = cli.main,
    compiler: bool | None = None,
) -> str:
    """A run that is killed at a step and goes on ends as the whole one, bit for bit; returns what the second start
    printed. For the arguments see `kill_at`.
    """
    run = kill_at(step, command, processes, main, compiler)
    output = resume(command, processes, main, compiler)
    assert_same_run(run, whole)
    return output


def wait_until(reached: Callable[[], object]) -> None:
    """Until something is so, which must not take for ever."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def step_of(output: Path) -> int:
    """The last step that the run has logged; cheap enough to be asked every millisecond."""
    try:
        with open(output / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            steps = re.findall(rb'^{"step": (\d+),.*}$', file.read(), re.MULTILINE)
    except FileNotFoundError:
        return -1
    return int(steps[-1]) if steps else -1


def saved(output: Path) -> list[Path]:
    """Checkpoints that are whole, oldest first: they are renamed to their names when all is written."""
    return sorted((output / "checkpoints").glob("step-*[0-9]"))


def curve(output: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("speed/", "memory/"))}
        for line in read_metrics(output)
    ]


def weights(output: Path, step: int | Literal["best"] | None = None) -> dict[str, torch.Tensor]:
    """fp32 weights of a run's checkpoint."""
    return read_weights(output, step, print)[1]


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Equal names, and values within a tolerance; 0: bit for bit."""
    assert left.keys() == right.keys()
    for name in left:
        if tolerance:
            difference = (left[name] - right[name]).abs().max().item()
            assert difference <= tolerance, f"{name} differs by {difference}"
        else:
            assert torch.equal(left[name], right[name]), name


def assert_same_run(run: Path, whole: Path) -> None:
    """Equal curves and last weights, bit for bit."""
    assert curve(run) == curve(whole)
    assert_same_weights(weights(run), weights(whole))
