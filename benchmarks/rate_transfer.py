"""Whether a learning rate found with a small model serves larger ones: the best rate by width, depth and
parametrization, at equal tokens.

    python benchmarks/rate_transfer.py --data SHARDS --json FILE [--processes N] [--draw FILE.svg] [--quick]
    python benchmarks/rate_transfer.py --json docs/rates.json --draw docs/rates.svg      # what was measured

For AdamW and Muon, `model.parametrization` standard and mup, and each shape, the validation loss after --steps steps at
rates that are powers of two times the first one, further up or down until the best has a worse one on both sides; the
best rate is the minimum of a parabola through these three. FILE has each run as soon as it has ended; the same command
goes on behind them, and draws. --quick: a few steps of two tiny shapes with AdamW, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from synthetic_batches import hardware

SHAPES = ((128, 2), (128, 4), (128, 8), (256, 2), (512, 2))  # width, layers
Shapes = tuple[tuple[int, int], ...]
QUICK = ((64, 1), (128, 1))
HEAD = 64
# Where the search begins, for the smallest shape: near its best.
FIRST = {
    ("adamw", "standard"): 1e-3,
    ("adamw", "mup"): 5e-4,
    ("muon", "standard"): 8e-3,
    ("muon", "mup"): 2e-3,
}
# The same text for all, long enough that the encoder counts and not word frequencies alone.
SETTINGS = {
    "train.global_batch_size": 32,
    "train.micro_batch_size": 32,
    "train.precision": "fp32",
    "train.log_every_steps": 50,
    "masking.rate": 0.3,
    "schedule.warmup_share": 0.1,
    "evaluation.every_steps": 0,
    "evaluation.samples": 1024,
    "checkpoint.every_steps": 0,
    "model.type_vocab_size": 0,
    "model.hidden_dropout_prob": 0,
    "model.attention_probs_dropout_prob": 0,
}


class Case(NamedTuple):
    """What has a best rate."""

    optimizer: str
    parametrization: str
    width: int
    layers: int

    def command(self, rate: float, given: argparse.Namespace, output: Path) -> list[str]:
        own = {
            "model.hidden_size": self.width,
            "model.num_hidden_layers": self.layers,
            "model.num_attention_heads": self.width // HEAD,
            "model.intermediate_size": 4 * self.width,
            "model.parametrization": self.parametrization,
            "optimizer.name": self.optimizer,
            "train.learning_rate": rate,
            "train.max_steps": given.steps,
        }
        options = [word for name, value in {**SETTINGS, **own}.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "cloze", "pretrain", "--data", given.data, "--output", str(output), *options]


class Measured:
    """Losses by case and rate, in a file that every new one is written to.

    Args:
        given: the command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._lock = given, Lock()
        self._content: dict = {"hardware": hardware("cpu"), "steps": given.steps, "runs": []}
        if given.json.exists():
            self._content = json.loads(given.json.read_text())
        if self._content["steps"] != given.steps:
            sys.exit(
                f"{given.json}: found runs of {self._content['steps']} steps, expected {given.steps}; give another"
            )

    def of(self, case: Case) -> dict[float, float]:
        """Losses by rate, ascending; inf for a run that has diverged."""
        found = {run["rate"]: run["loss"] for run in self._content["runs"] if tuple(run["case"]) == case}
        return {rate: math.inf if found[rate] is None else found[rate] for rate in sorted(found)}

    def search(self, case: Case) -> None:
        """Train at one rate after the other until the best has a worse one on both sides."""
        first = FIRST[case[:2]]
        if case.parametrization == "standard":  # lower for wider models, since that is where the search would end
            first /= 2 ** round(math.log2(case.width / SHAPES[0][0]))
        while (rate := next_rate(self.of(case), first)) is not None:
            loss = self._train(case, rate)
            with self._lock:
                self._content["runs"].append({"case": case, "rate": rate, "loss": loss})
                self._given.json.write_text(json.dumps(self._content, indent=1) + "\n")
            print(*case, f"{rate:g}", loss, flush=True)

    def _train(self, case: Case, rate: float) -> float | None:
        """The last validation loss; None: the run has diverged."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            command = case.command(rate, self._given, output)
            ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if ended.returncode:
                sys.exit(f"{' '.join(command)}: status {ended.returncode}\n{ended.stderr[-2000:]}")
            lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        loss = [line["validation/loss"] for line in lines if "validation/loss" in line][-1]
        return loss if loss is not None and math.isfinite(loss) else None


def next_rate(losses: dict[float, float], first: float) -> float | None:
    """The rate to try next; None: the best so far has a worse one on both sides."""
    if not losses:
        return first
    best = min(losses, key=lambda rate: losses[rate])
    return next((rate for rate in (best * 2, best / 2) if rate not in losses), None)


def best_rate(losses: dict[float, float]) -> float | None:
    """The minimum of a parabola, in log2 of the rate, through the best and its neighbours; None: a side is missing."""
    best = min(losses, key=lambda rate: losses[rate], default=0.0)
    below, above = losses.get(best / 2), losses.get(best * 2)
    if below is None or above is None:
        return None
    if not math.isfinite(above):  # diverged: nothing to fit
        return best
    return float(best * 2 ** ((below - above) / (2 * (below + above - 2 * losses[best]))))


def draw(measured: Measured, shapes: Shapes, optimizers: tuple[str, ...], path: str) -> None:
    """Loss over rate, a panel for each optimizer and parametrization, a line for each shape."""
    from cloze.launch.system.pictures import colours, new_figure, save

    figure = new_figure(11, 8)
    panels = figure.subplots(len(optimizers), 2, sharey="row", squeeze=False)
    for row, optimizer in zip(panels, optimizers, strict=True):
        for axes, parametrization in zip(row, ("standard", "mup"), strict=True):
            for (width, layers), colour in zip(shapes, colours(len(shapes)), strict=True):
                losses = measured.of(Case(optimizer, parametrization, width, layers))
                finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
                axes.plot(list(finite), list(finite.values()), marker="o", color=colour, label=f"{width} x {layers}")
                if (best := best_rate(losses)) is not None:
                    axes.axvline(best, color=colour, linestyle=":", linewidth=1)
            axes.set_xscale("log", base=2)
            rates = sorted({rate for shape in shapes for rate in measured.of(Case(optimizer, parametrization, *shape))})
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])  # a log scale's own labels are formulas
            axes.minorticks_off()
            axes.set_title(f"{optimizer}, {parametrization}")
            axes.set_xlabel("peak learning rate (dotted: the best)")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("validation loss")
        row[0].legend(title="width x layers", fontsize="small")
    save(figure, Path(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="shards; without them FILE is shown as it is")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--draw", metavar="FILE.svg")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    shapes, optimizers = SHAPES, ("adamw", "muon")
    if given.quick:
        given.steps, shapes, optimizers = 5, QUICK, ("adamw",)
    measured = Measured(given)
    kinds = [(optimizer, parametrization) for optimizer in optimizers for parametrization in ("standard", "mup")]
    if given.data:
        with ThreadPoolExecutor(given.processes) as pool:
            list(pool.map(measured.search, [Case(*kind, *shape) for shape in shapes for kind in kinds]))
    for kind in kinds:
        found = {shape: measured.of(Case(*kind, *shape)) for shape in shapes}
        best = {shape: rate for shape, losses in found.items() if (rate := best_rate(losses)) is not None}
        shown = [f"{w} x {n}: {rate:.2e} ({min(found[w, n].values()):.3f})" for (w, n), rate in best.items()]
        print(*kind, "best rate (loss):", ", ".join(shown))
        ratios = [rate / next(iter(best.values())) for rate in best.values()]
        print(f"  as multiples of the first one's: {min(ratios):.2f} to {max(ratios):.2f}")
    if given.draw:
        draw(measured, shapes, optimizers, given.draw)


if __name__ == "__main__":
    main()
