"""Memory of a pretraining step by gradient checkpointing, for BERT-base and BERT-large.

    python benchmarks/activation_memory.py [--device cpu] [--sequences 32] [--length 128] [--json FILE]

Two figures for each mode: what forward keeps for backward (bytes of the distinct tensors that autograd saves, weights
aside: the same on every device), and the measured peak of forward and backward beyond the weights, gradients included
(resident memory on CPU, allocated memory on CUDA). fp32 weights under bf16 autocast, dropout 0, full sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from synthetic_batches import build, concatenate, hardware, make_batch

MODES = "none", "every_3", "every_2", "all"
MODELS = {"BERT-base": "base", "BERT-large": "large"}
VOCABULARY = 30522


def memory(device: str, peak: bool) -> int:
    """Bytes in use by this process on the device, now or at most until now."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def worker(arguments: argparse.Namespace) -> None:
    """Print the bytes that forward keeps, and those at the peak beyond the weights."""
    import torch

    device, length = arguments.device, arguments.length
    model = build("cloze", {"checkpointing": arguments.mode}, MODELS[arguments.model], VOCABULARY, length, device)
    batch = concatenate(make_batch(VOCABULARY, length, 1.0, arguments.sequences, 0))
    batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = memory(device, peak=False)
    with torch.autocast(device, torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    total = sum(kept.values())
    loss.backward()
    print(total, memory(device, peak=True) - before, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", metavar="FILE", help="file for the figures, in MiB")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        return worker(arguments)
    print(" ".join([Path(sys.executable).name, *sys.argv]))
    print(f"{hardware(arguments.device)}, {arguments.sequences} x {arguments.length} tokens, MiB: kept / peak\n")
    print(f"{'':<12}" + "".join(f"{mode:>18}" for mode in MODES))
    figures = {}
    for model in MODELS:
        cells = []
        for mode in MODES:  # a process each, since a peak never falls
            command = [sys.executable, __file__, "--model", model, "--mode", mode, "--device", arguments.device]
            command += ["--sequences", str(arguments.sequences), "--length", str(arguments.length)]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            kept, peak = (int(value) / 2**20 for value in output.split())
            figures |= {f"{model}, {mode}, kept": kept, f"{model}, {mode}, peak": peak}
            cells.append(f"{f'{kept:,.0f} / {peak:,.0f}':>18}")
        print(f"{model:<12}" + "".join(cells), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
