"""Real tokens a second of a pretraining step: Cloze against transformers, on the same batches.

    python benchmarks/training_step.py [--quick] [--json FILE] [--threads 1] [--rounds 7] [--memory]

A step is forward, backward and fused AdamW, dropout 0, both losses. Every contender is a process of its own
(the allocator is set before a process starts); they take turns, a step each, so that a busy machine hurts all
alike, and the medians are compared. Padding counts as nothing: sequences are drawn as BERT's procedure makes
them, mostly full, some short, and every contender gets the same micro-batches, sorted by length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# glibc keeps freed pages instead of returning them to the kernel, which would have to clear them again.
KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
CONTENDERS = {  # name -> (library, options, environment)
    "transformers fp32 eager (its default)": ("transformers", {"attention": "eager"}, {}),
    "transformers SDPA + compile + bf16": (
        "transformers", {"attention": "sdpa", "compile": True, "bf16": True}, {}),
    "transformers bf16 eager, malloc keeps pages": (
        "transformers", {"attention": "eager", "bf16": True}, KEEP_PAGES),
    "transformers bf16 SDPA, malloc keeps pages": (
        "transformers", {"attention": "sdpa", "bf16": True}, KEEP_PAGES),
    "cloze bf16": ("cloze", {"bf16": True}, {}),
    "cloze bf16, malloc keeps pages": ("cloze", {"bf16": True}, KEEP_PAGES),
}  # fmt: skip
WARMUP_STEPS, WARMUP_SECONDS = 6, 5.0
SHAPES = {
    "small": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024),
    "base": dict(),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
}
# Workload -> shape, vocabulary, length, share of full sequences (the others are uniform), sequences a step
WORKLOADS = {
    "small, 128": ("small", 8192, 128, 0.92, 64),
    "small, 512": ("small", 8192, 512, 0.76, 16),
    "BERT-base, 128": ("base", 30522, 128, 0.92, 8),
}
GPU_WORKLOADS = {
    "BERT-base, 128": ("base", 30522, 128, 0.92, 256),
    "BERT-large, 512": ("large", 30522, 512, 0.76, 32),
}


def make_batch(vocab_size: int, length: int, full_share: float, num_sequences: int, seed: int) -> dict:
    """Padded ids, segments, mask, labels at 15% of the tokens, and pair labels."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    short = torch.rand(num_sequences, generator=generator) >= full_share
    lengths = torch.where(short, torch.randint(8, length, (num_sequences,), generator=generator), length)
    lengths = lengths.sort(descending=True).values
    shape = (num_sequences, length)
    mask = torch.arange(length) < lengths[:, None]
    ids = torch.randint(5, vocab_size, shape, generator=generator) * mask
    masked = (torch.rand(shape, generator=generator) < 0.15) & mask
    return {
        "input_ids": ids,
        "token_type_ids": ((torch.arange(length) >= lengths[:, None] // 2) & mask).long(),
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~masked, -100),
        "next_sentence_label": torch.randint(0, 2, (num_sequences,), generator=generator),
    }


def concatenate(padded: dict) -> dict:
    """The same batch as Cloze's pipeline makes it: tokens one after another, positions of the labels."""
    import torch

    mask = padded["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    labels = padded["labels"][mask]
    positions = (labels != -100).nonzero()[:, 0]
    return {
        "input_ids": padded["input_ids"][mask],
        "token_type_ids": padded["token_type_ids"][mask],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sequence_offsets": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "max_sequence_length": max(lengths),
        "masked_positions": positions,
        "labels": labels[positions],
        "next_sentence_label": padded["next_sentence_label"],
    }


def build(library: str, options: dict, shape: str, vocab_size: int, length: int, device: str):
    """A model in training mode without dropout."""
    import torch

    sizes = SHAPES[shape] | dict(
        vocab_size=vocab_size,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    if library == "cloze":
        from model.bert import BertForPreTraining, init_weights
        from model.config import BertConfig

        model = BertForPreTraining(
            BertConfig(**sizes),
            attention_kernel=options.get("attention", "auto"),
            gradient_checkpointing=options.get("checkpointing", "none"),
        )
        init_weights(model, 0)
        if options.get("compile"):
            model.bert.encoder.compile_layers()
    else:
        from transformers import BertConfig, BertForPreTraining

        model = BertForPreTraining(BertConfig(**sizes, attn_implementation=options["attention"]))
        if options.get("compile"):
            model.compile()
    return model.train().to(device)


def worker(name: str, workload: str, device: str, threads: int) -> None:
    """Build one contender, then run a step for each line on standard input and answer with its seconds."""
    import torch

    library, options, _ = contenders(device)[name]
    torch.set_num_threads(threads)
    shape, vocab_size, length, full_share, num_sequences = workloads(device)[workload]
    model = build(library, options, shape, vocab_size, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [make_batch(vocab_size, length, full_share, num_sequences, seed) for seed in range(4)]
    batches = [concatenate(batch) if library == "cloze" else batch for batch in batches]
    batches = [
        {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()} for batch in batches
    ]

    def step(batch: dict) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=options.get("bf16", False)):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # Until compilers have compiled and the allocator has seen every batch; the slow need fewer.
    started = time.perf_counter()
    for number in range(WARMUP_STEPS):
        step(batches[number % len(batches)])
        if number and time.perf_counter() - started > WARMUP_SECONDS:
            break
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter(), time.process_time()
        step(batches[number % len(batches)])
        if device == "cuda":
            torch.cuda.synchronize()
        print(time.perf_counter() - start[0], time.process_time() - start[1], flush=True)


def contenders(device: str) -> dict:
    """The contenders that make sense on this device."""
    if device == "cpu":
        return CONTENDERS
    bf16 = {"bf16": True}
    return {
        "transformers fp32 eager (its default)": ("transformers", {"attention": "eager"}, {}),
        "transformers SDPA + compile + bf16": (
            "transformers",
            {"attention": "sdpa", "compile": True} | bf16,
            {},
        ),
        "cloze bf16": ("cloze", bf16, {}),
        "cloze bf16, compiled layers": ("cloze", bf16 | {"compile": True}, {}),
    }


def workloads(device: str) -> dict:
    return WORKLOADS if device == "cpu" else GPU_WORKLOADS


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
        environment = os.environ | contenders(device)[name][2] | {"TOKENIZERS_PARALLELISM": "false"}
        processes[name] = subprocess.Popen(
            worker_command(name, workload, device, threads),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
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
    from model.config import BertConfig
    from model.flops import training_flops

    shape, vocab_size, length, full_share, num_sequences = workloads(device)[workload]
    config = BertConfig(vocab_size=vocab_size, max_position_embeddings=length, **SHAPES[shape])
    flops, tokens = [], []
    for seed in range(4):
        batch = make_batch(vocab_size, length, full_share, num_sequences, seed)
        lengths = batch["attention_mask"].sum(1).tolist()
        flops.append(training_flops(config, lengths, int((batch["labels"] != -100).sum())))
        tokens.append(sum(lengths))
    return statistics.mean(flops), statistics.mean(tokens)


def hardware(device: str) -> str:
    """The name of what this ran on."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true",
        help="the first workload only, without the SDPA peers (never the fastest on CPU): under 50 seconds",
    )  # fmt: skip
    parser.add_argument(
        "--cpu_time", action="store_true", help="count CPU seconds: for one thread on a machine that is shared"
    )
    parser.add_argument("--memory", action="store_true", help="instead: peak memory by gradient checkpointing")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each contender")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--workload", help="only this one, e.g. 'small, 512'")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device is None:
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.worker:
        return worker(arguments.worker, arguments.workload, arguments.device, arguments.threads)
    if arguments.checkpointing:
        return memory_worker(arguments.checkpointing, arguments.workload, arguments.device, arguments.threads)
    if arguments.memory:
        return report_memory(arguments)
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    """Measure, print the table, write the figures."""
    device, names = arguments.device, list(contenders(arguments.device))
    chosen = [arguments.workload] if arguments.workload else list(workloads(device))
    rounds = arguments.rounds
    if arguments.quick:
        chosen, rounds = chosen[:1], 3
        names = [name for name in names if "SDPA" not in name]
    peak = matmul_peak(device, arguments.threads)
    print(" ".join([Path(sys.executable).name, *sys.argv]))
    print(f"{hardware(device)}, {arguments.threads} threads, bf16 matmul peak {peak / 1e9:.0f} GFLOP/s\n")
    figures = {"hardware": hardware(device), "threads": arguments.threads, "matmul_peak_flops": peak, "workloads": {}}
    for workload in chosen:
        seconds = measure(workload, device, arguments.threads, rounds, names, arguments.cpu_time)
        flops, tokens = useful_flops(workload, device)
        default = seconds[names[0]]
        print(f"{workload:<46}{'s a step':>9}{'tokens/s':>11}{'ratio':>8}{'of peak':>9}")
        for name, time_of_step in seconds.items():
            print(
                f"  {name:<44}{time_of_step:9.3f}{tokens / time_of_step:11,.0f}"
                f"{default / time_of_step:8.2f}{flops / time_of_step / peak:9.1%}"
            )
        print(flush=True)
        figures["workloads"][workload] = {
            name: {"seconds": value, "tokens_per_second": tokens / value, "share_of_matmul_peak": flops / value / peak}
            for name, value in seconds.items()
        }
        length = workload.split(", ")[1]
        ours = min(value for name, value in seconds.items() if name.startswith("cloze"))
        best = min(value for name, value in seconds.items() if name.startswith("transformers"))
        if f"ratio_to_transformers_default_{length}" not in figures:  # the first workload of a length gives the name
            figures[f"ratio_to_transformers_default_{length}"] = default / ours
            figures[f"ratio_to_transformers_best_{length}"] = best / ours
        figures.setdefault("share_of_matmul_peak", flops / ours / peak)
    print("Fused AdamW everywhere; bf16 is torch.autocast over fp32 weights. A contender's process:")
    for name in names:
        variables = [f"{key}={value}" for key, value in contenders(device)[name][2].items()]
        print("  " + shlex.join(variables + worker_command(name, chosen[0], device, arguments.threads)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


MEMORY_WORKLOADS = {
    "BERT-base, 128": ("base", 30522, 128, 1.0, 32),
    "BERT-large, 128": ("large", 30522, 128, 1.0, 32),
}


def memory_worker(checkpointing: str, workload: str, device: str, threads: int) -> None:
    """Print the bytes at the peak of a forward and backward, beyond the weights; gradients included."""
    import torch

    torch.set_num_threads(threads)
    shape, vocab_size, length, full_share, num_sequences = MEMORY_WORKLOADS[workload]
    model = build("cloze", {"checkpointing": checkpointing}, shape, vocab_size, length, device)
    batch = concatenate(make_batch(vocab_size, length, full_share, num_sequences, 0))
    batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}

    def memory(peak: bool) -> int:
        if device == "cuda":
            return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        if peak:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = memory(peak=False)
    with torch.autocast(device, torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    print(memory(peak=True) - before, flush=True)


def report_memory(arguments: argparse.Namespace) -> None:
    """Peak memory of a step for each way of checkpointing."""
    print(f"{'peak beyond weights, bf16, 32 x 128 tokens':<46}{'none':>10}{'every_2':>10}{'all':>10}")
    for workload in MEMORY_WORKLOADS:
        cells = []
        for checkpointing in ("none", "every_2", "all"):
            command = [sys.executable, __file__, "--checkpointing", checkpointing, "--workload", workload]
            command += ["--device", arguments.device, "--threads", str(arguments.threads)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            cells.append(f"{int(output) / 2**20:8,.0f} M")
        print(f"  {workload:<44}{''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
