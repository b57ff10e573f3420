"""What `cloze pretrain` costs beside the step itself: engine and loop, checkpoints, a second process.

    python benchmarks/overhead.py [--quick] [--json FILE] [--data SHARDS] [--threads 1] [--rounds 7] [--store URL]

All train configs/pretrain/small.yaml on the same batches: a plain torch loop (the same model, loader, autocast,
clipping and fused AdamW, and nothing else), the loop through DeepSpeed as `cloze pretrain` runs it, the same with a
checkpoint in each turn, written in the background or in line, and the same by two processes; with --store also one
that saves to an object store, below the URL. Every contender is a process (or two) of its own with so many threads;
they take turns, so that a busy machine hurts all alike, and medians are compared. What the step loop waits for a
checkpoint is what a run logs as speed/checkpoint_wait_seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from synthetic_batches import hardware

ROOT = Path(__file__).resolve().parents[1]
PLAIN, OURS, TWO = "plain torch loop", "cloze pretrain", "cloze pretrain, 2 processes"
BACKGROUND, IN_LINE = "cloze pretrain, saving in the background", "cloze pretrain, saving in line"
STORED = "cloze pretrain, saving to a store"
CONTENDERS = PLAIN, OURS, BACKGROUND, IN_LINE, TWO
# A turn logs once and saves once, after its second step, so that the writing falls into it.
STEPS_A_TURN, FIRST_TURN = 6, 4
WARMUP_TURNS = 2  # until the allocator has seen its batches and the first checkpoint is there


class Turns:
    """Batches for one turn after the other; each begins with a line on standard input and answers with its seconds.

    Args:
        answers: whether this process is the one that answers.
        finish: waits for what is queued on the device.
    """

    def __init__(self, stream: Iterator, answers: bool, finish: Callable[[], None]) -> None:
        self._stream, self._answers, self._finish = stream, answers, finish
        self._left: int | None = None
        self._began = 0.0, 0.0

    def __iter__(self) -> Turns:
        return self

    def __next__(self):
        if self._left in (None, 0):
            self._end_turn()
            self._left = FIRST_TURN if self._left is None else STEPS_A_TURN
            if not sys.stdin.readline():
                raise SystemExit
            self._began = time.perf_counter(), time.process_time()
        self._left -= 1
        return next(self._stream)

    def _end_turn(self) -> None:
        if self._left is None:
            line = "ready"
        else:
            self._finish()
            line = f"{time.perf_counter() - self._began[0]} {time.process_time() - self._began[1]}"
        if self._answers:
            print(line, flush=True)


def worker(name: str, data: Path, output: Path, threads: int, store: str | None) -> None:
    """Train as this contender does, in turns."""
    from cloze.launch.system.environment.process import prepare_process, protect_process

    protect_process()
    environment = prepare_process()
    import torch

    from cloze.launch.commands import parse
    from cloze.launch.pretrain.data import open_data
    from cloze.launch.pretrain.inputs import choose_data_streams
    from cloze.launch.system import distributed
    from cloze.pipeline.loading.batches import BatchStream
    from cloze.pipeline.shards.reader import ShardReader

    torch.set_num_threads(threads)
    device = distributed.initialize(environment)
    config = parse(
        "pretrain",
        [
            "--config",
            str(ROOT / "configs/pretrain/small.yaml"),
            "--data",
            str(data),
            *(
                ("--output", f"{store}/{output.name}-{time.time_ns()}", "--checkpoint.scratch", str(output))
                if name == STORED
                else ("--output", str(output))
            ),
            "--train.max_steps",
            "1000000",
            "--train.log_every_steps",
            str(STEPS_A_TURN),
            "--evaluation.every_steps",
            "0",
            "--checkpoint.every_steps",
            str(STEPS_A_TURN if name in (BACKGROUND, IN_LINE, STORED) else 0),
            "--checkpoint.asynchronous",
            str(name != IN_LINE).lower(),
            "--checkpoint.keep_last",
            "1",
        ],
    )
    opened, model = open_data(config)
    config = replace(config, model=model)
    config = replace(config, data_streams=choose_data_streams(config, environment.world_size))
    train = config.train
    stream = BatchStream(
        ShardReader(str(data), "train"),
        global_batch_size=train.global_batch_size,
        streams=config.data_streams,
        seed=config.seed,
        micro_batch_size=train.micro_batch_size,
        rank=environment.rank,
        world_size=environment.world_size,
    )
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    contend = plain_loop if name == PLAIN else our_loop
    contend(config, opened, environment, device, Turns(stream, environment.is_main, finish))


def plain_loop(config, opened, environment, device, turns) -> None:
    """What a short script would do."""
    import torch

    from cloze.launch.pretrain.first_model import build_model
    from cloze.launch.system.devices import to_device

    model = build_model(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate, fused=True)
    for batch in turns:
        for micro_batch in batch.micro_batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**to_device(micro_batch, device)).loss / len(batch.micro_batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def our_loop(config, opened, environment, device, turns) -> None:
    """What `cloze pretrain` does when all is prepared."""
    from cloze.launch.pretrain.inputs import RunInputs
    from cloze.launch.pretrain.objectives.factory import make_objective
    from cloze.launch.pretrain.pretraining_run import Pretraining
    from cloze.launch.run.heartbeat import Heartbeat
    from cloze.launch.run.preemption import StopRequest
    from cloze.launch.run.stored_run import open_stored_run
    from cloze.launch.system.console import Console
    from cloze.launch.training.process import Process, recorded
    from cloze.launch.training.start import Training

    console = Console(is_main=False)
    with (
        open_stored_run(config, environment, console) as (config, place),
        Heartbeat(Path(config.output), environment, config.monitor) as heartbeat,
    ):
        process = Process(environment, device, console, heartbeat, place)
        inputs = RunInputs(config, opened, [], make_objective(config), [], opened.facts)
        training, stop = Training(Pretraining(inputs), process), StopRequest()
        training.measure = None  # no evaluation before the first step
        with recorded(config, training.progress, process, stop, training.kept, training.checkpoints) as record:
            record.complete = training.loop(record.metrics, stop).run(turns)


class Contender:
    """The processes of one contender, waiting for their turns."""

    def __init__(self, name: str, data: Path, output: Path, threads: int, store: str | None = None) -> None:
        self.name, self.output = name, output
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world_size = 2 if name == TWO else 1
        command = [
            sys.executable,
            __file__,
            "--worker",
            name,
            "--data",
            str(data),
            "--output",
            str(output),
            "--threads",
            str(threads),
            *(["--store", store] if store else []),
        ]
        common = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
            )
            for rank in range(world_size)
        ]

    def answer(self) -> str:
        """The next line of rank 0."""
        line = self.processes[0].stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended with status {self.processes[0].wait()}")
        return line

    def turn(self, counts: bool) -> None:
        """Train for a turn; note its seconds a step if it counts."""
        for process in self.processes:
            process.stdin.write("turn\n")
            process.stdin.flush()
        seconds, cpu_seconds = map(float, self.answer().split())
        if counts:
            self.seconds.append(seconds / STEPS_A_TURN)
            self.cpu_seconds.append(cpu_seconds / STEPS_A_TURN)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()

    def logged(self, scalar: str) -> float:
        """Median of what the run has logged; the first line comes before the first checkpoint."""
        from cloze.launch.run.metrics_file import read_metrics

        (path,) = self.output.rglob("metrics.jsonl")  # of a run in a store it lies deeper
        return statistics.median(line[scalar] for line in read_metrics(path.parent) if scalar in line)


def prepare_data(folder: Path) -> Path:
    """Shards of the docstrings of the standard library, of the size of a few hundred steps."""
    from prepare import found_text

    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in found_text()))
    books = ["--config", str(ROOT / "configs/prepare/books.yaml"), "--input", str(corpus)]
    for command in (
        ["vocab", *books, "--output", str(folder / "vocab")],
        ["prepare", *books, "--tokenizer", str(folder / "vocab"), "--output", str(folder / "shards")],
    ):
        subprocess.run([sys.executable, "-m", "cloze", *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder / "shards"


def report(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure, print the table and write the figures."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name for name in CONTENDERS if name != TWO or device == "cpu" or torch.cuda.device_count() > 1]
    names += [STORED] if arguments.store else []
    data = Path(arguments.data).resolve() if arguments.data else prepare_data(folder)
    contenders = {
        name: Contender(name, data, folder / f"run-{number}", arguments.threads, arguments.store)
        for number, name in enumerate(names)
    }
    print(f"{len(contenders)} contenders start", file=sys.stderr, flush=True)
    for contender in contenders.values():  # all start at once: importing takes longer than measuring
        contender.answer()
    for turn in range(WARMUP_TURNS + arguments.rounds):
        print(f"turn {turn + 1} of {WARMUP_TURNS + arguments.rounds}", file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.turn(counts=turn >= WARMUP_TURNS)
    for contender in contenders.values():
        contender.close()
    print(" ".join([Path(sys.executable).name, *sys.argv]))
    turns = f"{arguments.rounds} turns of {STEPS_A_TURN} steps"
    print(f"{hardware(device)}, {arguments.threads} threads a process, {turns}\n")
    print(f"{'':<44}{'s a step':>9}{'ratio':>7}{'CPU s':>9}{'ratio':>7}")
    medians = {name: statistics.median(contender.seconds) for name, contender in contenders.items()}
    cpu = {name: statistics.median(contender.cpu_seconds) for name, contender in contenders.items()}
    for name in names:
        print(
            f"{name:<44}{medians[name]:9.4f}{medians[name] / medians[PLAIN]:7.3f}"
            f"{cpu[name]:9.4f}{cpu[name] / cpu[PLAIN]:7.3f}"
        )
    # Neighbouring turns are compared, since the machine's speed drifts.
    ratios = map(lambda ours, plain: ours / plain, contenders[OURS].seconds, contenders[PLAIN].seconds)
    figures = {
        "overhead": statistics.median(ratios) - 1,
        "overhead_cpu_time": cpu[OURS] / cpu[PLAIN] - 1,
        "checkpoint_wait_seconds_background": contenders[BACKGROUND].logged("speed/checkpoint_wait_seconds"),
        "checkpoint_wait_seconds_in_line": contenders[IN_LINE].logged("speed/checkpoint_wait_seconds"),
    }
    if STORED in contenders:
        figures["checkpoint_wait_seconds_store"] = contenders[STORED].logged("speed/checkpoint_wait_seconds")
        figures["checkpoint_wait_ratio_store"] = (
            figures["checkpoint_wait_seconds_store"] / figures["checkpoint_wait_seconds_background"]
        )
    if TWO in contenders:
        figures["scaling_1_to_2_processes"] = medians[OURS] / medians[TWO]
    print("\n" + "\n".join(f"{name:<44}{value:9.4f}" for name, value in figures.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures below the table there")
    parser.add_argument("--data", help="shards; default: made of the standard library's docstrings")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--store", help="URL below which a further contender saves, as s3://bucket/benchmark")
    parser.add_argument("--rounds", type=int, help="measured turns of each contender; default: 7, quick: 3")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 7)
    if arguments.worker:
        return worker(
            arguments.worker, Path(arguments.data), Path(arguments.output), arguments.threads, arguments.store
        )
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, Path(folder))


if __name__ == "__main__":
    main()
