"""A step of `cloze pretrain` as it is on this machine, and as `cloze plan` estimates it: seconds and memory.

    python benchmarks/planned_and_measured.py base@128 --json FILE
    python benchmarks/planned_and_measured.py tiny@64          # on a CPU: after `cloze doctor`, which measures it

Both commands are given the same shards of random ids, whose lengths are those of BERT's procedure, the same model and
the same batch. The run finds the largest micro-batch that fits, and the plan is asked about that one. Seconds are the
median of the lines of metrics.jsonl after the first half of the run, in which layers are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from loading import make_shards

from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.runs import fields_of
from cloze.launch.system.environment.launchers import child_variables

LOG_EVERY = 4


@dataclass(frozen=True)
class Shape:
    """A model of configs/model, tokens of a sequence, sequences of a step on each device."""

    model: str
    length: int
    batch: int


SHAPES = {
    "base@128": Shape("base", 128, 512),
    "base@512": Shape("base", 512, 128),
    "large@128": Shape("large", 128, 256),
    "large@512": Shape("large", 512, 64),
    "distil-base@128": Shape("distil-base", 128, 512),
    "modern@1024": Shape("modern-1024", 1024, 64),
    "tiny@64": Shape("tiny", 64, 32),  # for a rehearsal on a CPU
}


def cloze(*words: object) -> str:
    """Run a command of cloze; returns what it printed, and ends this process with it if it failed."""
    command = [sys.executable, "-m", "cloze", *map(str, words)]
    done = subprocess.run(command, env=child_variables(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\nended with status {done.returncode}")
    return done.stdout


def measure(shape: Shape, processes: int, steps: int, folder: Path) -> dict[str, float]:
    """Run and plan one shape; figures by name."""
    batch = shape.batch * processes
    data = make_shards(folder / "data", 4, max(512, steps * batch // 4), shape.length, strategy="token")
    settings = {
        "data": data,
        "model": shape.model,
        "train.sequence_length": shape.length,
        "train.max_steps": steps,
        "train.global_batch_size": batch,
        "train.micro_batch_size": "auto",
        "train.learning_rate": 1e-4,
        "schedule.warmup_steps": 4,
        "evaluation.every_steps": 0,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    run = folder / "run"
    only_run = ("--output", run, "--checkpoint.every_steps", 0, "--train.log_every_steps", LOG_EVERY)
    cloze("pretrain", *words, *only_run, "--monitor.inspect_every_steps", 0, "--processes", processes)
    lines = [line for line in read_metrics(run) if "speed/step_seconds" in line and line["step"] > steps // 2]
    micro = fields_of(run)["train.micro_batch_size"]
    cloze(
        *("plan", *words, "--train.micro_batch_size", micro),
        *("--device", "this", "--gpus", processes, "--json", folder / "plan.json"),
    )
    planned = json.loads((folder / "plan.json").read_text())
    seconds = statistics.median(line["speed/step_seconds"] for line in lines)
    figures = {
        "micro_batch_size": micro,
        "largest_micro_batch_by_plan": planned["largest_micro_batch_size"],
        "step_seconds": seconds,
        "planned_step_seconds": planned["step_seconds"],
        "seconds_over_plan": seconds / planned["step_seconds"],
        "mfu": planned["mfu"] * planned["step_seconds"] / seconds,
        "planned_mfu": planned["mfu"],
        "tokens_per_second": planned["tokens_per_second"] * planned["step_seconds"] / seconds,
    }
    if torch.cuda.is_available():  # a CPU's peak is the process's, with all that it has imported
        peak = max(line["memory/peak_gib"] for line in lines) * 2**30
        figures |= {"bytes": peak, "planned_bytes": planned["memory_bytes"]}
        figures["bytes_over_plan"] = peak / planned["memory_bytes"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--processes", type=int, default=1, help="one on each device")
    parser.add_argument("--steps", type=int, default=40, help="the latter half counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(SHAPES[arguments.shape], arguments.processes, arguments.steps, Path(folder))
    for name, value in figures.items():
        print(f"{name:<30}{value:,.4f}" if isinstance(value, float) else f"{name:<30}{value:,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
