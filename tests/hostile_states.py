"""Checkpoints whose tensors and plain values were changed, with the right hashes, and runs that resume from them.

The right answer is a line and status 2, or status 0 where nothing is wrong that a resume can notice.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.forked import ForkedRun
from tests.launch.checkpoint.small_checkpoints import rewrite
from tests.launching import kill_all, pretrain_arguments, train
from tests.synthetic import make_shards

PATIENCE_SECONDS = 120
STEPS, SAVED = 6, 3
RUN = ("--train.max_steps", str(STEPS), "--checkpoint.every_steps", str(SAVED), "--checkpoint.keep_last", "3")
OPTIMIZERS = ("adamw", "lamb", "muon", "stable_adamw")
STAGES = ("0", "1", "2")
# Other values for plain ones.
PLAIN = (None, True, -1, 10**9, 2**63, 0.5, float("nan"), "", "x", [], {}, [1, 2], {"a": 1}, torch.ones(2))
# Other tensors in the place of one.
TENSORS: dict[str, Callable[[torch.Tensor], object]] = {
    "another shape": lambda t: torch.zeros(3, 5, 2),
    "one dimension more": lambda t: t[None],
    "transposed": lambda t: torch.zeros(*t.shape, 1).flatten(-2).T.contiguous() if t.dim() == 2 else t[None, None],
    "half as long": lambda t: t.flatten()[: t.numel() // 2],
    "empty": lambda t: t.new_zeros(0),
    "without dimension": lambda t: torch.tensor(1.0),
    "whole numbers": lambda t: t.long(),
    "booleans": lambda t: t > 0,
    "complex": lambda t: t.to(torch.complex64),
    "double": lambda t: t.double(),
    "bf16": lambda t: t.bfloat16(),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]]),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "negated": lambda t: torch._neg_view(-t),
    "expanded": lambda t: torch.zeros(()).expand(t.shape),
    "negative": lambda t: -t.abs() - 1,
    "NaN": lambda t: t * float("nan"),
    "a NaN": lambda t: torch.cat([t.flatten()[:-1], torch.tensor([float("nan")])]).reshape(t.shape),
    "a list": lambda t: t.tolist(),
    "a number": lambda t: 1.0,
    "nothing": lambda t: None,
    "a text": lambda t: "x",
    "tensors in a list": lambda t: [t],
}


def change(tree: object, rng: random.Random) -> str:
    """Change one place of nested dicts and lists of tensors and plain values; returns what was done."""
    path: list[object] = []
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys)
        path.append(key)
        value = tree[key]
        if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
            tree = value
            continue
        how = rng.random()
        if how < 0.12:
            del tree[key]
            return f"{path}: removed"
        if how < 0.2 and isinstance(tree, dict):
            tree[rng.choice((f"{key}x", 7, -1))] = tree.pop(key)
            return f"{path}: renamed"
        if how < 0.28:
            if isinstance(tree, dict):
                tree[rng.choice(("more", 99, -1))] = value
            else:
                tree.append(value)
            return f"{path}: one more"
        if isinstance(value, torch.Tensor) and how < 0.9:
            name = rng.choice(list(TENSORS))
            tree[key] = TENSORS[name](value)
            return f"{path}: {name}"
        try:
            tree[key] = rng.choice(PLAIN)
        except TypeError:  # a tuple, a shape
            continue
        return f"{path}: {tree[key]!r:.40}"


def files_of(checkpoint: Path) -> list[Path]:
    """The files that a resume loads, that of the optimizer's states more than once."""
    files = sorted(checkpoint.glob("*.pt"))
    return files + 3 * [path for path in files if "optim" in path.name]


def resumed(data: Path, run: Path, options: tuple[str, ...]) -> str | None:
    """Why a resume did not end well; None if it did."""
    process = ForkedRun(pretrain_arguments(data, run, *options))
    try:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        kill_all(process)
        return "a hang"
    if "Traceback" in output:
        return f"a traceback: {output[-3000:]}"
    if process.returncode == 2:
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        return None if len(errors) == 1 else f"{len(errors)} lines of errors: {output[-1500:]}"
    return None if process.returncode == 0 else f"status {process.returncode}: {output[-1500:]}"


def attacks(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str | None]]:
    """Resume so many crafted checkpoints, fewer where a change can't be made of a tensor; yields the optimizer and the
    ZeRO stage, and what was done and why it did not end well, None if it did.
    """
    rng, data, whole = random.Random(seed), make_shards(folder / "data"), {}
    for number in range(count):
        optimizer, stage = rng.choice(OPTIMIZERS), rng.choice(STAGES)
        options = (*RUN, "--optimizer.name", optimizer, "--zero.stage", stage, "--ema.decay", "0.9")
        if (optimizer, stage) not in whole:
            whole[optimizer, stage] = folder / f"{optimizer}-{stage}"
            train(data, whole[optimizer, stage], *options)
            shutil.rmtree(whole[optimizer, stage] / f"checkpoints/step-{STEPS:08d}")
        run = folder / f"crafted-{number}"
        shutil.copytree(whole[optimizer, stage], run)
        path = rng.choice(files_of(run / f"checkpoints/step-{SAVED:08d}"))
        done: list[str] = []

        def alter(content: dict) -> None:
            for _ in range(rng.choice((1, 1, 1, 2))):
                done.append(change(content, rng))  # noqa: B023

        try:
            rewrite(path, alter)
        except (TypeError, RuntimeError, IndexError, AttributeError, NotImplementedError, ValueError):  # no such tensor
            shutil.rmtree(run)
            continue
        wrong = resumed(data, run, options)
        yield f"{optimizer} at ZeRO {stage}", f"{path.name}: {' and '.join(done)}: {wrong}" if wrong else None
        shutil.rmtree(run)
