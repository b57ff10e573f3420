"""The tables of docs/scaling.md and docs/recipes.md, and of the recipes' headers, by `cloze plan`: nothing is measured.

python benchmarks/plans.py                                 # prints the tables of the docs, some minutes of one core
python benchmarks/plans.py --headers [RECIPE ...]          # writes those of the files in configs/pretrain, of all
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cloze.launch import cli  # noqa: E402
from cloze.launch.system.environment.launchers import read_environment  # noqa: E402
from cloze.launch.system.environment.process import prepare_deepspeed  # noqa: E402
from cloze.launch.tools.planning.assumptions import MASKED_SHARE  # noqa: E402

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


# Numbers of GPUs in a recipe's header, if the batch divides by them: as far as each reaches a quarter of the best MFU,
# and the next one.
COUNTS = (1, 4, 8, 16, 64, 256, 1024)
_BEGINS = "#   planned on H100s: GPUs", "#                     MFU "


def planned(recipe: str, counts: Iterable[int] = COUNTS) -> dict[int, float]:
    """MFU of a recipe on so many H100s, up to the first number that reaches less than a quarter of the best."""
    from cloze.launch.config import BatchArithmetic
    from cloze.launch.tools.plan import make_estimator
    from cloze.pipeline.errors import UserError

    found: dict[int, float] = {}
    with _teacher_of(recipe) as words:
        config = _plan_config(recipe, "h100", 1, *words)
        estimator = make_estimator(config)
        for gpus in counts:
            try:
                BatchArithmetic.of(config.train, gpus)
            except UserError:
                continue
            estimator = make_estimator(config, gpus, estimator)  # which knows the last one's traces
            found[gpus] = estimator.best_mfu(config.zero.stage)
            if found[gpus] < max(found.values()) / 4:
                break
    return found


def planned_header(recipe: str) -> list[str]:
    """The two lines of a recipe's header with its planned MFU by number of GPUs."""
    found = planned(recipe)
    most = max(gpus for gpus, share in found.items() if share >= max(found.values()) / 2)
    gpus, mfu = "".join(f"{gpus:7,}" for gpus in found), "".join(f"{share:7.0%}" for share in found.values())
    return [_BEGINS[0] + gpus, f"{_BEGINS[1]}{mfu}   at least half of the best up to {most:,}"]


def recipe_path(recipe: str) -> Path:
    return ROOT / f"configs/pretrain/{recipe}.yaml"


def header(recipe: str) -> list[str]:
    """The lines of planned MFU that stand in a recipe."""
    return [line for line in recipe_path(recipe).read_text("utf-8").splitlines() if line.startswith(_BEGINS)]


def shares(recipe: str) -> dict[int, float]:
    """The MFU that stands in a recipe by number of GPUs."""
    gpus, mfu = (line.removeprefix(begin) for line, begin in zip(header(recipe), _BEGINS, strict=True))
    return {
        int(count.replace(",", "")): int(share) / 100
        for count, share in zip(gpus.split(), re.findall(r"(\d+)%", mfu), strict=True)
    }


def published() -> list[str]:
    """The recipes that have numbers of GPUs in their headers."""
    paths = (ROOT / "configs/pretrain").glob("*.yaml")
    return sorted(path.stem for path in paths if "GPUs: " in path.read_text("utf-8"))


def write_header(recipe: str) -> None:
    """Put the table behind the other comments at the top of a recipe, in place of the one that is there."""
    lines = recipe_path(recipe).read_text("utf-8").splitlines()
    lines = [line for line in lines if not line.startswith(_BEGINS)]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    lines[end:end] = planned_header(recipe)
    recipe_path(recipe).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join([recipe, *header(recipe)]), flush=True)


@contextmanager
def _teacher_of(recipe: str) -> Iterator[list[str]]:
    """Options that name a teacher of BERT-base's shape for a recipe with one."""
    if "teacher:" not in recipe_path(recipe).read_text("utf-8"):
        yield []
        return
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        transformers.BertForMaskedLM(transformers.BertConfig()).save_pretrained(folder)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(30517))]
        (Path(folder) / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        yield ["--objective_options.teacher", folder, "--init_from", folder]


def masked_share(recipe: str) -> float:
    """Share of the tokens that is masked: by the recipe, or by that of its data."""
    text = recipe_path(recipe).read_text("utf-8")
    data = re.search(r"configs/prepare/[\w-]+\.yaml", text)
    for source in (text, (ROOT / data[0]).read_text("utf-8")):
        if rate := (yaml.safe_load(source).get("masking") or {}).get("rate"):
            return rate
    return MASKED_SHARE


def _plan_config(recipe: str, device: str, gpus: int, *more: str):
    words = ["--config", recipe, "--device", device, "--gpus", str(gpus), "--masked_share", str(masked_share(recipe))]
    return cli.parse("plan", [*words, *more])


def estimate(recipe: str, device: str, gpus: int, *more: str):
    """The estimator and the step of a recipe, with the largest micro-batch; None for one that does not fit."""
    from cloze.launch.tools.plan import make_estimator

    config = _plan_config(recipe, device, gpus, *more)
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
                f"{estimator.memory(0, batch.micro_batch_size).total / 2**30:.0f}",
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
            f"{estimator.memory(stage, step.batch.micro_batch_size).total / 2**30:.0f}",
            step.batch.micro_batch_size,
            f"{step.communication_seconds * 1e3:.0f}: {step.waiting_seconds * 1e3:.0f} ms",
            f"{step.tokens_per_second / 1e6:.2f} M",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headers", nargs="*", metavar="RECIPE", help="write the tables of these recipes, or of all")
    options = parser.parse_args()
    prepare_deepspeed(read_environment())
    if options.headers is not None:
        for recipe in options.headers or published():
            write_header(recipe)
        return
    for table in (scaling, stages, micro_batches):
        print(f"\n{table.__name__}")
        table()


if __name__ == "__main__":
    main()
