"""Start real training processes, watch them, kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from launch.checkpoint import read_weights
from launch.environment import child_variables
from launch.metrics import FILE_NAME, read_metrics

ROOT = Path(__file__).resolve().parent.parent

# A model that takes a few milliseconds a step, with all that a real one has.
TINY = (
    "--model.hidden_size", "32", "--model.num_hidden_layers", "2", "--model.num_attention_heads", "2",
    "--model.intermediate_size", "64", "--model.max_position_embeddings", "32",
    "--train.global_batch_size", "16", "--train.micro_batch_size", "4", "--train.learning_rate", "3e-3",
    "--train.precision", "fp32", "--train.log_every_steps", "1", "--train.evaluate_every_steps", "0",
)  # fmt: skip


def pretrain_command(data: Path, output: Path, *overrides: str, processes: int = 1) -> list[str]:
    """The command of a run, through torchrun as on a cluster; one process alone needs none."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "launch", "pretrain", *TINY,
            "--data", str(data), "--output", str(output), *overrides]


def start(command: list[str]) -> subprocess.Popen:
    """Start a command as the leader of a process group of its own, so that all of it can be killed."""
    return subprocess.Popen(
        command, cwd=ROOT, env=child_variables(PYTHONUNBUFFERED="1"), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen, status: int | None = 0) -> str:
    """Wait for the end, check the exit status and return what was printed."""
    output, _ = process.communicate(timeout=300)
    assert status is None or process.returncode == status, f"status {process.returncode}:\n{output[-4000:]}"
    return output


def train(data: Path, output: Path, *overrides: str, processes: int = 1, status: int | None = 0) -> str:
    """Run to the end."""
    return finish(start(pretrain_command(data, output, *overrides, processes=processes)), status)


def kill_when(process: subprocess.Popen, reached: Callable[[], bool]) -> None:
    """SIGKILL every process of the run, at once, as soon as `reached`; the run must not have ended before."""
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, f"ended before it was killed:\n{process.communicate()[0][-4000:]}"
        assert time.monotonic() < deadline, "the moment to kill did not come in two minutes"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def step_of(output: Path) -> int:
    """The last step that the run has logged."""
    lines = read_metrics(output) if (output / FILE_NAME).exists() else []
    return lines[-1]["step"] if lines else -1


def curve(output: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    return [{name: value for name, value in line.items() if not name.startswith("speed/")}
            for line in read_metrics(output)]


def weights(output: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """fp32 weights of a run's checkpoint."""
    return read_weights(output, step)[1]


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Equal names, and values within a tolerance; 0: bit for bit."""
    assert left.keys() == right.keys()
    for name in left:
        if tolerance:
            difference = (left[name] - right[name]).abs().max().item()
            assert difference <= tolerance, f"{name} differs by {difference}"
        else:
            assert torch.equal(left[name], right[name]), name
