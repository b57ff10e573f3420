"""Real tokens a second of a pretraining step: Cloze against transformers, on the same batches.

    python benchmarks/training_step.py [--quick] [--json FILE] [--threads 1] [--rounds 7] [--workload 'small, 512']

A step is forward, backward and fused AdamW, dropout 0, both losses (of ModernBERT masked tokens alone). Every
contender is a process of its own (the allocator is set before a process starts); they take turns, so that a busy
machine hurts all alike, and the medians are compared. Padding counts as nothing: sequences of random ids have lengths
as BERT's procedure makes them, mostly full, some short, and every contender gets the same micro-batches, sorted by
length. The share of the peak counts the FLOPs that the losses and gradients need: real tokens, the vocabulary at
masked tokens, the last layer where it is read. Where there is a GPU, it is measured after the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from synthetic_batches import (
    SHAPES,
    build,
    command_line,
    concatenate,
    hardware,
    make_batch,
    own_command,
    shape_of,
)

# glibc keeps freed pages instead of returning them to the kernel, which would have to clear them again.
KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
DEFAULT = "transformers fp32 eager (its default)"
CONTENDERS = {  # name -> (library, options, environment)
    DEFAULT: ("transformers", {"attention": "eager"}, {}),
    "transformers SDPA + compile + bf16": ("transformers", {"attention": "sdpa", "compile": True, "bf16": True}, {}),
    "transformers SDPA + compile + bf16, malloc keeps pages": (
        "transformers",
        {"attention": "sdpa", "compile": True, "bf16": True},
        KEEP_PAGES,
    ),
    "transformers bf16 SDPA, malloc keeps pages": ("transformers", {"attention": "sdpa", "bf16": True}, KEEP_PAGES),
    "transformers bf16 eager, malloc keeps pages": ("transformers", {"attention": "eager", "bf16": True}, KEEP_PAGES),
    "cloze bf16, malloc as it comes": ("cloze", {"bf16": True}, {}),
    "cloze bf16, as cloze pretrain runs": ("cloze", {"bf16": True, "keep_pages": True}, {}),
}
GPU_CONTENDERS = {
    DEFAULT: ("transformers", {"attention": "eager"}, {}),
    "transformers bf16 SDPA": ("transformers", {"attention": "sdpa", "bf16": True}, {}),
    "transformers SDPA + compile + bf16": ("transformers", {"attention": "sdpa", "compile": True, "bf16": True}, {}),
    # which takes sequences without their padding
    **(
        {"transformers bf16 flash": ("transformers", {"attention": "flash_attention_2", "bf16": True}, {})}
        if importlib.util.find_spec("flash_attn")
        else {}
    ),
    "cloze bf16": ("cloze", {"bf16": True}, {}),
    "cloze bf16, compiled layers": ("cloze", {"bf16": True, "compile": True}, {}),
}
QUICK = DEFAULT, "transformers bf16 eager, malloc keeps pages", "cloze bf16, as cloze pretrain runs"
WARMUP_STEPS, WARMUP_SECONDS = 6, 5.0
STEPS_A_TURN = {"cpu": 1, "cuda": 10}  # a GPU works through a queue, which one step alone leaves empty
# Workload -> shape, vocabulary, length, share of full sequences (the others are uniform), sequences a step
WORKLOADS = {
    "small, 128": ("small", 8192, 128, 0.92, 64),
    "small, 512": ("small", 8192, 512, 0.76, 16),
    "BERT-base, 128": ("base", 30522, 128, 0.92, 8),
}
GPU_WORKLOADS = {
    "BERT-base, 128": ("base", 30522, 128, 0.92, 256),
    "BERT-large, 512": ("large", 30522, 512, 0.76, 32),
    "ModernBERT-base, 1024": ("modern", 50368, 1024, 0.76, 16),
}


def contenders(device: str) -> dict:
    """The contenders that make sense on this device."""
    return CONTENDERS if device == "cpu" else GPU_CONTENDERS


def workloads(device: str) -> dict:
    """All workloads of this device by name."""
    return WORKLOADS if device == "cpu" else GPU_WORKLOADS


def batches_of(workload: str, device: str) -> list[dict]:
    """The padded batches of a workload, which take turns."""
    shape, vocab_size, length, full_share, num_sequences = workloads(device)[workload]
    sizes = vocab_size, length, full_share, num_sequences
    return [make_batch(*sizes, seed, pairs=shape in SHAPES) for seed in range(4)]


def worker(name: str, workload: str, device: str, threads: int) -> None:
    """Build one contender, then run its turn for each line on standard input and answer with its seconds a step."""
    import torch

    library, options, _ = contenders(device)[name]
    if options.get("keep_pages"):
        from cloze.launch.system.environment.process import bound_primitive_caches, keep_freed_pages

        keep_freed_pages()
        bound_primitive_caches()
    torch.set_num_threads(threads)
    shape, vocab_size, length, *_ = workloads(device)[workload]
    model = build(library, options, shape, vocab_size, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = batches_of(workload, device)
    batches = [concatenate(batch) if library == "cloze" else batch for batch in batches]
    batches = [
        {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()} for batch in batches
    ]

    def step(number: int) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=options.get("bf16", False)):
            loss = model(**batches[number % len(batches)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    # Until compilers have compiled and the allocator has seen every batch; the slow need fewer.
    started = time.perf_counter()
    for number in range(WARMUP_STEPS):
        step(number)
        wait()
        if number and time.perf_counter() - started > WARMUP_SECONDS:
            break
    print("ready", flush=True)
    steps = STEPS_A_TURN[device]
    for turn, _ in enumerate(sys.stdin):
        wait()
        start = time.perf_counter(), time.process_time()
        for number in range(turn * steps, (turn + 1) * steps):
            step(number)
        wait()
        print((time.perf_counter() - start[0]) / steps, (time.process_time() - start[1]) / steps, flush=True)


def variables(name: str, device: str) -> dict[str, str]:
    """Environment variables of a contender's process."""
    return contenders(device)[name][2] | {"TOKENIZERS_PARALLELISM": "false"}


def worker_command(name: str, workload: str, device: str, threads: int) -> list[str]:
    """The command that runs one contender; it answers each line on its standard input with a step's seconds."""
    options = {"worker": name, "workload": workload, "device": device, "threads": str(threads)}
    return [sys.executable, __file__, *itertools.chain(*((f"--{key}", value) for key, value in options.items()))]


def measure(
    workload: str, device: str, threads: int, rounds: int, names: list[str], cpu_time: bool
) -> dict[str, float]:
    """Median seconds of a step for each contender, which take turns."""
    processes = {}
    for name in names:  # all start at once: importing takes longer than measuring
        processes[name] = subprocess.Popen(
            worker_command(name, workload, device, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables(name, device),
        )
    for name, process in processes.items():
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"{name}: the process ended with status {process.wait()}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, process in processes.items():
            process.stdin.write("step\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"{name}: the process ended with status {process.wait()}")
            seconds[name].append(float(answer.split()[cpu_time]))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return {name: statistics.median(times) for name, times in seconds.items()}


def matmul_peak(device: str, threads: int) -> float:
    """FLOP/s of the fastest of a few square bf16 products: what this machine gives at best."""
    import torch

    torch.set_num_threads(threads)
    best = 0.0
    for size in (1024, 2048) if device == "cpu" else (8192,):
        left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        for _ in range(20):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            left @ left
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def useful_flops(workload: str, device: str) -> tuple[float, float]:
    """FLOPs and real tokens of a step, averaged over the batches that the workers use."""
    from cloze.model.flops import TokenCounts, training_flops, unread_flops

    config = shape_of(*workloads(device)[workload][:3])
    flops, tokens = [], []
    for batch in batches_of(workload, device):
        lengths = batch["attention_mask"].sum(1).tolist()
        num_masked = int((batch["labels"] != -100).sum())
        spared = unread_flops(config, sum(lengths), num_masked + len(lengths))
        flops.append(training_flops(config, TokenCounts.of_lengths(lengths, num_masked)) - spared)
        tokens.append(sum(lengths))
    return statistics.mean(flops), statistics.mean(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the first workload, 3 rounds, on CUDA where there is one; on CPU three contenders, the default and the "
        "fastest: under 50 seconds",
    )
    parser.add_argument(
        "--cpu_time", action="store_true", help="count CPU seconds: for one thread on a machine that is shared"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write ratio_to_transformers_default_N, ratio_to_transformers_best_N (N: the first workload's length), "
        "share_of_matmul_peak (those of CUDA end in _cuda), and by workload the tokens a second of each contender and "
        "the ratio to transformers' best there",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each contender")
    parser.add_argument("--rounds", type=int, help="measured turns of each contender; default: 7, quick: 3")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cpu, then cuda where there is one")
    parser.add_argument("--workload", help="only this one, e.g. 'small, 512'")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.workload, arguments.device, arguments.threads)
    print(own_command("transformers", "torch"))
    figures: dict = {"workloads": {}, "ratios_to_transformers_best": {}}
    for device in devices(arguments):
        found = report(arguments, device)
        for name in ("workloads", "ratios_to_transformers_best"):
            figures[name] |= found.pop(name)
        figures |= found
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


def devices(arguments: argparse.Namespace) -> list[str]:
    """Those to measure on: of what was asked for, or of what is there, those that have the workload."""
    import torch

    found = [arguments.device] if arguments.device else ["cpu", *["cuda"] * torch.cuda.is_available()]
    if arguments.quick and not arguments.workload:
        found = found[-1:]  # both would take too long
    known = {device: list(workloads(device)) for device in found}
    chosen = [device for device in found if arguments.workload in (None, *known[device])]
    if not chosen:
        raise SystemExit(f"--workload: found {arguments.workload!r}, expected one of {known}")
    return chosen


def selection(arguments: argparse.Namespace, device: str) -> tuple[list[str], list[str]]:
    """Names of the workloads and of the contenders that were asked for."""
    names = list(QUICK if arguments.quick and device == "cpu" else contenders(device))
    known = list(workloads(device))
    return [arguments.workload] if arguments.workload else known[: 1 if arguments.quick else None], names


def report(arguments: argparse.Namespace, device: str) -> dict:
    """Measure, print a table for each workload and the commands; returns the figures of the first workload, in
    `workloads` the real tokens a second of each contender by workload and device, and in `ratios_to_transformers_best`
    the ratio of each workload.
    """
    chosen, names = selection(arguments, device)
    peak = matmul_peak(device, arguments.threads)
    print(f"{hardware(device)}, {arguments.threads} threads, bf16 matmul peak {peak / 1e9:.0f} GFLOP/s\n")
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    figures: dict[str, float] = {}
    rates: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    for workload in chosen:
        seconds = measure(workload, device, arguments.threads, rounds, names, arguments.cpu_time)
        flops, tokens = useful_flops(workload, device)
        rates[f"{workload}, {device}"] = {name: tokens / time_of_step for name, time_of_step in seconds.items()}
        print(f"{workload:<56}{'s a step':>9}{'tokens/s':>11}{'ratio':>7}{'of peak':>9}")
        for name, time_of_step in seconds.items():
            print(
                f"  {name:<54}{time_of_step:9.4f}{tokens / time_of_step:11,.0f}"
                f"{seconds[DEFAULT] / time_of_step:7.2f}{flops / time_of_step / peak:9.1%}"
            )
        print(flush=True)
        ours = min(value for name, value in seconds.items() if name.startswith("cloze"))
        best = min(value for name, value in seconds.items() if name.startswith("transformers"))
        ratios[f"{workload}, {device}"] = best / ours
        if not figures:
            length, suffix = workloads(device)[workload][2], "_cuda" if device == "cuda" else ""
            figures = {
                f"ratio_to_transformers_default_{length}{suffix}": seconds[DEFAULT] / ours,
                f"ratio_to_transformers_best_{length}{suffix}": best / ours,
                f"share_of_matmul_peak{suffix}": flops / ours / peak,
            }
    print("Fused AdamW everywhere; bf16 is torch.autocast over fp32 weights. A contender's process:")
    for name in names:
        command = worker_command(name, chosen[0], device, arguments.threads)
        print(f"  {command_line(command, variables(name, device))}")
    print()
    return figures | {"workloads": rates, "ratios_to_transformers_best": ratios}


if __name__ == "__main__":
    main()
