"""The tables of docs/scaling.md and docs/recipes.md, by `cloze plan`: nothing is measured, some minutes of one core.

python benchmarks/plans.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cloze.launch import cli
from cloze.launch.system.environment import prepare_deepspeed, read_environment

# Share of the tokens that each recipe's data has masked (configs/prepare/).
MASKED = {"mosaicbert-base": 0.30, "crammed-24h": 0.25, "modernbert-base-phase1": 0.30}
RECIPES = (
    "bert-base-phase1",
    "bert-base-phase2",
    "bert-large-phase1",
    "bert-large-phase2",
    "nvidia-lamb-large-phase1",
    "nvidia-lamb-large-phase2",
    "academic-24h",
    "mosaicbert-base",
    "crammed-24h",
    "roberta-base",
    "modernbert-base-phase1",
)
CARDS = ("a10", "a100-40gb", "h100", "h200")
# Recipe, and what changes where a batch does not divide.
SCALING = (
    ("roberta-base", {8: (), 64: (), 1024: ()}),
    ("nvidia-lamb-large-phase1", {8: (), 64: (), 1024: ()}),
    (
        "modernbert-base-phase1",
        {
            8: (),
            64: ("--train.initial_global_batch_size", "2304"),
            1024: ("--train.global_batch_size", "4096", "--train.initial_global_batch_size", "1024"),
        },
    ),
)


def estimate(recipe: str, device: str, gpus: int, *more: str):
    """The estimator and the step of a recipe, with the largest micro-batch; None for one that does not fit."""
    from cloze.launch.tools.plan import make_estimator

    config = cli.parse(
        "plan",
        [
            "--config",
            recipe,
            "--device",
            device,
            "--gpus",
            str(gpus),
            "--masked_share",
            str(MASKED.get(recipe, 0.15)),
            *more,
        ],
    )
    estimator = make_estimator(config)
    stage = config.zero.stage
    size = estimator.largest_micro_batch(stage)
    return estimator, None if size is None else estimator.step(stage, size)


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def micro_batches() -> None:
    """One GPU of each card: what `micro_batch_size: auto` should find."""
    row("recipe", *CARDS)
    row("---", *("---" for _ in CARDS))
    for recipe in RECIPES:
        cells = []
        for card in CARDS:
            estimator, step = estimate(recipe, card, 1)
            cells.append(
                "none"
                if step is None
                else f"{step.batch.micro_batch_size}: {step.flops / step.seconds / estimator.cluster.machine.flops:.0%}"
            )
        row(recipe, *cells)


def scaling() -> None:
    row(
        "recipe",
        "GPUs",
        "batch",
        "GiB a GPU",
        "launches: host, device",
        "communication: waits",
        "step",
        "tokens/s",
        "MFU",
        "hours",
        "data",
    )
    row(*["---"] * 11)
    for recipe, cases in SCALING:
        for gpus, more in cases.items():
            estimator, step = estimate(recipe, "h100", gpus, *more)
            micro, batch = step.micro, step.batch
            mfu = step.flops / step.seconds / (estimator.cluster.machine.flops * gpus)
            row(
                recipe,
                f"{gpus:,}",
                f"{batch.micro_batch_size} × {batch.gradient_accumulation_steps} × {gpus:,}",
                f"{step.memory.total / 2**30:.0f}",
                f"{micro.launches:,}: {micro.host_seconds * 1e3:.0f}, {micro.device_seconds * 1e3:.0f} ms",
                f"{step.communication_seconds * 1e3:.1f}: {step.waiting_seconds * 1e3:.1f} ms",
                f"{step.seconds:.3g} s",
                f"{step.tokens_per_second / 1e6:.2f} M",
                f"{mfu:.0%}",
                f"{estimator.seconds_of_run(step) / 3600:,.3g}",
                f"{step.tokens_per_second * 4.1 / 1e6:,.0f} MB/s",
            )


def stages() -> None:
    from cloze.launch.tools.plan import make_estimator

    row("BERT-large at 512, 64 GPUs", "GiB a GPU", "micro-batch", "communication: waits", "tokens/s")
    row(*["---"] * 5)
    config = cli.parse(
        "plan",
        ["--config", "bert-large-phase2", "--device", "h100", "--gpus", "64", "--train.global_batch_size", "16384"],
    )
    estimator = make_estimator(config)
    for stage in estimator.stages():
        step = estimator.step(stage, estimator.largest_micro_batch(stage))
        row(
            f"stage {stage}",
            f"{step.memory.total / 2**30:.0f}",
            step.batch.micro_batch_size,
            f"{step.communication_seconds * 1e3:.0f}: {step.waiting_seconds * 1e3:.0f} ms",
            f"{step.tokens_per_second / 1e6:.2f} M",
        )


if __name__ == "__main__":
    prepare_deepspeed(read_environment())
    for table in (scaling, stages, micro_batches):
        print(f"\n{table.__name__}")
        table()
