"""Backward of the projection to queries, keys and values in both forms of `train.qkv_gradients`, in turns.

    python benchmarks/qkv_gradients.py [--device cuda] [--json FILE]

`parts` takes products of width x width for each of the three, `joined` one pass that concatenates their gradients and
products of 3 width x width. Printed are medians in microseconds, and joined over parts: below 1 the default is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from cloze.model.residual_linear import branch

# Width and tokens of a micro-batch; on a CPU a size that ends soon.
SHAPES = {"cuda": {"large": (1024, 65536), "base": (768, 65536)}, "cpu": {"tiny": (128, 512)}}
ROUNDS, TIMES = 15, 10


def microseconds(device: str, width: int, tokens: int) -> dict[str, float]:
    """Median time of a forward and backward pass of each form."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    linear = nn.Linear(width, 3 * width, device=device, dtype=dtype)
    inputs = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    gradients = [torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(4)]

    def turn(joined: bool) -> float:
        began = time.perf_counter()
        for _ in range(TIMES):
            torch.autograd.backward(branch(inputs, linear, [width] * 3, joined=joined), gradients)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / TIMES * 1e6

    turn(False), turn(True)  # warm
    found = [(turn(False), turn(True)) for _ in range(ROUNDS)]
    return {
        name: statistics.median(each) for name, each in zip(("parts", "joined"), zip(*found, strict=True), strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures = {}
    for name, (width, tokens) in SHAPES[arguments.device].items():
        times = microseconds(arguments.device, width, tokens)
        figures[name] = times | {"joined_over_parts": times["joined"] / times["parts"]}
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures[name].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
