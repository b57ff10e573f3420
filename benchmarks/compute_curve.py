"""The score on BLiMP over the compute of pretraining, beside what others have published; and what more would give.

    python benchmarks/compute_curve.py --json docs/compute.json --plan --data SHARDS
    python benchmarks/compute_curve.py --json docs/compute.json --data SHARDS --lines FILE --blimp DIR --output RUNS \\
        [--budgets 1e14 3e14] [--seeds 1 2 3] [--processes 2] [--precision fp32]
    python benchmarks/compute_curve.py --json docs/compute.json --draw docs/compute.svg --page docs  # as measured

For each budget in FLOPs and each seed a run of configs/pretrain/strict-small.yaml with the settings of RECIPES, whose
steps follow from the budget: forward and backward by `model/flops.py`, of the lengths in the shards' manifest, next
tokens and masked ones each with the tokens that they predict. In half of each step's samples next tokens are predicted,
in the other half masked ones, both from the vector before (GPT-BERT's mixture, arXiv 2410.24159). More than ten epochs
are refused: BabyLM's limit since 2025. Then `cloze evaluate` on held-out lines and on BLiMP. FILE has a row for each
run as soon as it has been evaluated, on any machine; the same command goes on behind the rows, and resumes a run that
was stopped from its last checkpoint in RUNS. Rows with other settings or other data than a budget has now stay in FILE
and are not drawn. --precision: on a CPU without units for bf16, fp32 is the faster one. --plan: steps, tokens and
epochs; nothing is run. --quick: tiny runs on made text, to see that it works.

Each budget is a run of its own, since each has a shape of its own.

The fit is a power law of the error, 100 - score = a FLOPs^-b (as of other errors in arXiv 1712.00409): it can't exceed
100, and has no more constants than four budgets can determine. It is fitted to the logarithms of all runs by least
squares; the band is one standard error of a further run's score. Both need three budgets.

FLOPs of others are estimates: 6 x parameters x tokens. Those of 2023, in docs/results.md, are not drawn: theirs are
means over phenomena, with another filter of BLiMP, without a limit of epochs, and mostly without their tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from objectives import put
from prepare import found_text
from pretraining_curves import prepare_text
from synthetic_batches import hardware

from cloze.launch.system.environment.launchers import child_variables

ROOT = Path(__file__).resolve().parents[1]
MARKS = "<!-- compute-curve -->", "<!-- /compute-curve -->"
BUDGETS = (1e14, 3e14, 1e15, 3e15)
SEEDS = (1, 2, 3)
MOST_EPOCHS = 10  # BabyLM's limit since 2025
ASKED = 1e16  # FLOPs that the fit is asked about
STOPPED = 75  # exit status of a command that was stopped and can go on
SPECIAL_TOKENS = 2  # of a sample without pairs, never masked
WARMUP_STEPS = 200  # of the recipe


@dataclass(frozen=True)
class Recipe:
    """How strict-small is changed for a budget. options: of `cloze pretrain`. next_tokens: the share of the run up to
    which next tokens are predicted; 0 with train.causal_share: all of it. warmup: its share of the steps, up to the
    recipe's 200.
    """

    options: dict[str, Any] = field(default_factory=dict)
    next_tokens: float = 0.5
    warmup: float = 0.05


def _mixed(options: dict[str, Any]) -> Recipe:
    """Next tokens and masked ones in every step."""
    return Recipe(options | {"train.causal_share": 0.5, "model.shifted_predictions": "true"}, next_tokens=0.0)


def _shape(layers: int, width: int, heads: int, feed_forward: int) -> dict[str, Any]:
    return {
        "model.hidden_size": width,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": heads,
        "model.intermediate_size": feed_forward,
    }


# The largest budget that is not above a run's has its recipe. Trials change this table (docs/experiments.md), by
# held-out lines, never by BLiMP. Few FLOPs learn more from more tokens than from more weights: at half of 1e14 the
# shape here was the best of five. Those above have weights that grow with about the root of the FLOPs, as arXiv
# 2203.15556 found for larger models, but for 3e15: 8 x 256 had learned no more than 8 x 192 from equal tokens. Both
# kinds of prediction in every step learned more than one after the other at 1e14 and 3e14.
RECIPES: dict[float, Recipe] = {
    0.0: _mixed(_shape(4, 128, 2, 352)),
    3e14: _mixed(_shape(6, 160, 5, 432)),
    1e15: _mixed({}),
}
SHARED = {"evaluation.every_steps": 0, "checkpoint.keep_last": 2, "monitor.inspect_every_steps": 0}
QUICK_BUDGETS = (4e9, 8e9, 1.6e10)
QUICK = {
    0.0: Recipe(
        {
            "model.num_hidden_layers": 1,
            "model.hidden_size": 64,
            "model.num_attention_heads": 1,
            "model.intermediate_size": 128,
            "train.global_batch_size": 16,
            "train.micro_batch_size": 16,
            "evaluation.samples": 16,
            "train.log_every_steps": 2,
        }
    )
}


class Published(NamedTuple):
    """Another's score: the mean over BLiMP's paradigms by BabyLM's evaluation since 2025."""

    name: str
    parameters: float
    score: tuple[float, ...]
    """One, or the least and the best."""
    flops: float
    """An estimate."""
    estimate: str
    label: tuple[float, float, str]
    """Where the label is written, so that none covers another: points to the right and up, and its alignment."""


# Ten epochs of ten million words by a vocabulary of 16k: 165.3 M tokens (model card of instanton-hybrid).
TEN_EPOCHS = 165.3e6
PRODUCT = "6 × parameters × 165 M tokens of ten epochs"
PUBLISHED = (
    Published("BabyLM's baseline of 2025, GPT-2", 98e6, (65.08,), 6 * 98e6 * TEN_EPOCHS, PRODUCT, (0, -14, "center")),
    Published("GPT-BERT of 2025", 31e6, (71.3, 71.7), 6 * 31e6 * TEN_EPOCHS, PRODUCT, (-9, -12, "right")),
    Published("BabySteps", 39e6, (71.6,), 6 * 39e6 * TEN_EPOCHS, PRODUCT, (9, -12, "left")),
    Published("instanton-hybrid", 40e6, (72.1,), 6 * 40e6 * TEN_EPOCHS, PRODUCT, (-6, 8, "right")),
    Published("RecGPT-10M", 23e6, (73.1,), 2e17, "as given to us; the product would be 2e+16", (0, 9, "center")),
)


class Plan(NamedTuple):
    """A run of so many steps."""

    steps: int
    flops: float
    tokens: float
    epochs: float
    parameters: int
    options: dict[str, Any]
    """Of `cloze pretrain --config strict-small`, without data, output and seed."""


class Cost(NamedTuple):
    """What a recipe costs on some data."""

    flops: float
    """Mean of a sample."""
    tokens: float
    """Mean of a sample."""
    batch: int
    """Samples of a step."""
    samples: int
    """Of an epoch."""
    parameters: int
    recipe: Recipe

    def plan(self, steps: int) -> Plan:
        """A run of so many steps.

        Raises:
            SystemExit: it takes more than ten epochs, or is shorter than two steps.
        """
        epochs = steps * self.batch / self.samples
        if epochs > MOST_EPOCHS:
            sys.exit(f"{steps:,} steps: found {epochs:.1f} epochs, expected at most {MOST_EPOCHS}; take a larger model")
        if steps < 2:
            sys.exit(f"found {steps} steps, expected at least 2; give a larger budget, or more time")
        tokens = steps * self.batch * self.tokens
        own = {
            "train.max_steps": steps,
            "masking.next_tokens_until": int(self.recipe.next_tokens * tokens),
            "schedule.warmup_steps": max(1, min(WARMUP_STEPS, round(self.recipe.warmup * steps))),
        }
        options = SHARED | self.recipe.options | own
        return Plan(steps, steps * self.batch * self.flops, tokens, epochs, self.parameters, options)

    def of_budget(self, budget: float) -> Plan:
        """The run that takes so many FLOPs; raises as `plan`."""
        return self.plan(round(budget / (self.flops * self.batch)))


def recipe_of(budget: float, recipes: dict[float, Recipe]) -> Recipe:
    return recipes[max(least for least in recipes if least <= budget)]


def cost_of(recipe: Recipe, data: Path) -> Cost:
    """What a recipe costs on prepared data."""
    from cloze.launch.commands import parse
    from cloze.launch.system.environment.process import prepare_process

    prepare_process()
    from cloze.launch.pretrain.first_model import build_model
    from cloze.launch.pretrain.inputs import open_inputs
    from cloze.launch.pretrain.schedules import run_masking
    from cloze.model.flops import TokenCounts, num_parameters

    options = SHARED | recipe.options | {"masking.next_tokens_until": 0}
    run = open_inputs(parse("pretrain", command(options, str(data), "unused")), 1)
    batch, steps = run.config.train.global_batch_size, run.config.train.max_steps
    histogram = run.data.length_histogram / run.data.length_histogram.sum()
    lengths = np.arange(len(histogram))
    tokens, squares = float(lengths @ histogram), float(lengths**2 @ histogram)
    # The rate falls with the position; a sample has as many masked tokens as pipeline/samples/masking.py gives it.
    masking, at = run_masking(run.config, run.data), (np.arange(1000) + 0.5) / 1000 * steps * batch
    rates = masking.rate.at(at)
    wanted = np.maximum(1, np.rint(rates[:, None] * lengths))
    masked = np.minimum(wanted, np.maximum(0, lengths - SPECIAL_TOKENS)) @ histogram
    kinds = replace(masking, next_tokens_until=round(recipe.next_tokens * steps * batch))
    causal = np.array([float(kinds.causal_at(position)) for position in at])
    predicted = causal * (tokens - 1) + (1 - causal) * masked  # FLOPs are linear in it
    mean = run.objective.flops(TokenCounts(tokens, squares, float(predicted.mean())))
    return Cost(mean, tokens, batch, run.data.num_samples, num_parameters(build_model(run.config)), recipe)


def command(options: dict[str, Any], data: str, output: str) -> list[str]:
    """What follows `cloze pretrain`."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["--config", "strict-small", "--data", data, "--output", output, *words]


class Rows:
    """Finished rows in a file, a line each; several commands may write to it at once.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict]:
        return json.loads(self._path.read_text(encoding="utf-8"))["rows"] if self._path.exists() else []

    def find(self, **values: Any) -> dict | None:
        """The first row with these values."""
        return next((row for row in self.read() if values.items() <= row.items()), None)

    def add(self, row: dict) -> None:
        with self._alone():
            lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in [*self.read(), row])
            aside = self._path.with_name(f"{self._path.name}.tmp")
            aside.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")
            os.replace(aside, self._path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        folder = os.open(self._path.resolve().parent, os.O_RDONLY)  # a lock of the file itself would end with a replace
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


class Commands:
    """Commands that are stopped with this process: SIGTERM and SIGINT are passed on, so that runs save a checkpoint."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock, self._stopping = Lock(), False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(
        self, words: list[str], log: Path, used: Callable[[float], None] = lambda seconds: None, **variables: str
    ) -> None:
        """Run a command, its output at the end of a log.

        Args:
            used: called with its processor seconds when it has ended, whatever its status.

        Raises:
            SystemExit: it was stopped, or has failed.
        """
        with open(log, "ab") as file, self._lock:
            if self._stopping:
                sys.exit(STOPPED)
            process = subprocess.Popen(  # in a group of its own, so that a terminal's interrupt comes once
                words, stdout=file, stderr=file, env=child_variables(**variables), start_new_session=True
            )
            self._running.add(process.pid)
        _, status, spent = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self._running.discard(process.pid)
        used(spent.ru_utime + spent.ru_stime)
        if self._stopping or process.returncode == STOPPED:
            sys.exit(STOPPED)
        if process.returncode:
            sys.exit(f"{shlex.join(words)}: found status {process.returncode}, expected 0; see {log}")

    def _stop(self, *_: object) -> None:
        self._stopping = True
        for pid in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def cloze(*words: str) -> list[str]:
    return [sys.executable, "-m", "cloze", *words]


def evaluate(model: Path, folder: Path, given: argparse.Namespace, commands: Commands, threads: int) -> dict:
    """Scores of a model on held-out lines and BLiMP, of which each is measured once and kept in a folder."""
    found = {}
    for suite, data, every in (("lines", given.lines, given.every_nth_line), ("blimp", given.blimp, given.every_nth)):
        path = folder / f"{suite}-{every}.json"
        if not path.exists():
            words = ["evaluate", str(model), "--suite", suite, "--data", str(data), "--every_nth", str(every)]
            raw, began = folder / "found.json", time.monotonic()
            commands.run(cloze(*words, "--json", str(raw)), folder / "log.txt", OMP_NUM_THREADS=str(threads))
            path.write_text(json.dumps(json.loads(raw.read_text()) | {"seconds": time.monotonic() - began}))
        found[suite] = json.loads(path.read_text())
    lines, blimp = found["lines"], found["blimp"]
    return {
        "nats_per_character": round(-lines["log_likelihood_per_character"], 5),
        "characters": lines["characters"],
        "mean_of_paradigms": round(blimp["mean_of_paradigms"], 2),
        "mean_of_phenomena": round(blimp["mean_of_phenomena"], 2),
        "phenomena": {name: round(value, 1) for name, value in blimp["phenomena"].items()},
        "paradigms": {name: round(value, 1) for name, value in blimp["paradigms"].items()},
        "evaluation_seconds": round(lines["seconds"] + blimp["seconds"]),
    }


def measured_on() -> dict:
    """Where and when a row was measured, and by which version."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "hardware": f"{hardware('cpu')}, {len(os.sched_getaffinity(0))} cores",
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def digest_of(data: Path) -> str:
    """What tells prepared data from other: a part of the hash of its manifest."""
    return hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()[:12]


def trained(run: Path) -> tuple[float, int]:
    """Seconds of a run's steps over all of its parts, by its own clock, and the tokens that it has seen."""
    from cloze.launch.run.metrics_file import read_metrics

    seconds, before, tokens = 0.0, 0, 0
    for line in read_metrics(run):
        if "speed/step_seconds" in line:
            seconds += line["speed/step_seconds"] * (line["step"] - before)
            before, tokens = line["step"], line["data/tokens"]
    return seconds, tokens


def plans(given: argparse.Namespace, recipes: dict[float, Recipe]) -> dict[float, Plan]:
    """By budget; each is said."""
    found = {}
    for budget in given.budgets:
        found[budget] = cost_of(recipe_of(budget, recipes), given.data).of_budget(budget)
        print(f"{budget:g} FLOPs: {described(found[budget]._asdict())}", flush=True)
    return found


class Curve:
    """The runs of a command line.

    Args:
        given: the command line.
        recipes: as RECIPES.
    """

    def __init__(self, given: argparse.Namespace, recipes: dict[float, Recipe]) -> None:
        self._given, self._recipes = given, recipes
        self._rows, self._commands = Rows(given.json), Commands()
        self._plans = plans(given, recipes)
        self._ends = False

    def key(self, budget: float, seed: int) -> dict:
        """What a row is found by."""
        return {
            "budget": budget,
            "seed": seed,
            "recipe": asdict(recipe_of(budget, self._recipes)),
            "data": digest_of(self._given.data),
            "every_nth": self._given.every_nth,
            "every_nth_line": self._given.every_nth_line,
        }

    def run(self, job: tuple[float, int]) -> None:
        """Train, evaluate and write a row, unless it stands in the file. None begins after one that was stopped or has
        failed.
        """
        if self._ends:
            return
        try:
            self._run(job)
        except BaseException:
            self._ends = True
            raise

    def _run(self, job: tuple[float, int]) -> None:
        budget, seed = job
        key = self.key(*job)
        if self._rows.find(**key):
            return
        own = hashlib.sha256(json.dumps([key["recipe"], key["data"]]).encode()).hexdigest()[:6]
        folder = self._given.output / f"{budget:g}-seed-{seed}-{own}"
        folder.mkdir(parents=True, exist_ok=True)
        found = self._plans[budget]
        measured = self._train(found, seed, folder)
        scores = evaluate(folder / "run", folder, self._given, self._commands, self._given.threads)
        shown = command(found.options | self._own(seed), "DATA", "RUN")
        row = key | {"parameters": found.parameters, "steps": found.steps, "flops": float(f"{found.flops:.4g}")}
        row |= {"epochs": round(found.epochs, 3)} | measured | scores | measured_on()
        row |= {"processes": self._given.processes, "command": shlex.join(["cloze", "pretrain", *shown])}
        self._rows.add(row)
        print(f"{budget:g} FLOPs, seed {seed}: {described(row)}", flush=True)

    def _own(self, seed: int) -> dict[str, Any]:
        """Options of a run beside its budget's: the seed, and a precision that the machine is faster in."""
        return {"seed": seed} | ({"train.precision": self._given.precision} if self._given.precision else {})

    def _train(self, found: Plan, seed: int, folder: Path) -> dict:
        """The run to its end. Its processor seconds are None if a part of it was killed, whose are not known."""
        parts, ended, run = folder / "parts.json", folder / "ended.json", folder / "run"
        if not ended.exists():
            before = json.loads(parts.read_text()) if parts.exists() else []
            parts.write_text(json.dumps([*before, None]))

            def keep(seconds: float) -> None:
                parts.write_text(json.dumps([*before, seconds]))

            words = command(found.options | self._own(seed), str(self._given.data), str(run))
            threads = str(self._given.threads)
            self._commands.run(cloze("pretrain", *words), folder / "log.txt", keep, OMP_NUM_THREADS=threads)
            seconds, tokens = trained(run)
            used = json.loads(parts.read_text())
            content = {
                "tokens": tokens,
                "threads": self._given.threads,
                "seconds": round(seconds),
                "processor_seconds": None if None in used else round(sum(used)),
                "tokens_per_second": round(tokens / seconds, 1),
            }
            ended.write_text(json.dumps(content))
        return json.loads(ended.read_text())


def described(row: dict) -> str:
    """A plan or a row in a line."""
    text = (
        f"{row['flops']:.4g} counted, {row['parameters'] / 1e6:.2f} M parameters, {row['steps']:,} steps, "
        f"{row['tokens'] / 1e6:.2f} M tokens, {row['epochs']:.2f} epochs"
    )
    if "mean_of_paradigms" in row:
        text += (
            f", {row['seconds']:,} s, {row['nats_per_character']:.4f} nats a character, BLiMP "
            f"{row['mean_of_paradigms']:.2f} (paradigms), {row['mean_of_phenomena']:.2f} (phenomena)"
        )
    return text


class Fit(NamedTuple):
    """log10(100 - score) = constant + slope (log10 FLOPs - middle), with the errors of both."""

    constant: float
    slope: float
    middle: float
    inverse: np.ndarray
    """(X'X)^-1, (2, 2)."""
    variance: float
    """Of a run about the line."""

    @classmethod
    def of(cls, rows: list[dict]) -> Fit | None:
        """Of the runs; None: they have less than three budgets."""
        if len({row["budget"] for row in rows}) < 3:
            return None
        x = np.log10([row["flops"] for row in rows])
        y = np.log10([100 - row["mean_of_paradigms"] for row in rows])
        design = np.stack([np.ones_like(x), x - x.mean()], axis=1)
        inverse = np.linalg.inv(design.T @ design)
        found = inverse @ design.T @ y
        variance = float(((y - design @ found) ** 2).sum() / (len(x) - 2))
        return cls(float(found[0]), float(found[1]), float(x.mean()), inverse, variance)

    def at(self, flops: float) -> tuple[float, float]:
        """The score of a run, and its standard error."""
        place = np.array([1, math.log10(flops) - self.middle])
        error = 10 ** (self.constant + self.slope * place[1])
        deviation = math.sqrt(self.variance * (1 + place @ self.inverse @ place))
        return 100 - error, error * math.log(10) * deviation

    def __str__(self) -> str:
        score, deviation = self.at(ASKED)
        slope = math.sqrt(self.variance * self.inverse[1, 1])
        return (
            f"100 − score falls as FLOPs^({self.slope:.4f} ± {slope:.4f}); {ASKED:g} FLOPs would give "
            f"{score:.1f} ± {deviation:.1f} (a run's score, one standard error)"
        )


def shown_rows(rows: list[dict], recipes: dict[float, Recipe]) -> dict[float, list[dict]]:
    """By budget, ascending: those with the settings of now, on the data of the last one, by the most of BLiMP."""
    whole = [row for row in rows if row["recipe"] == asdict(recipe_of(row["budget"], recipes))]
    least = min((row["every_nth"] for row in whole), default=1)
    whole = [row for row in whole if (row["every_nth"], row["data"]) == (least, whole[-1]["data"])]
    found = defaultdict(list)
    for row in sorted(whole, key=lambda row: (row["budget"], row["seed"])):
        found[row["budget"]].append(row)
    if left := len(rows) - len(whole):
        print(f"{left} rows have other settings, other data or fewer pairs, and are left out")
    return found


def draw(found: dict[float, list[dict]], fit: Fit | None, path: Path) -> None:
    """Scores over FLOPs: each seed a dot, the fit with its band, and the published points."""
    from cloze.launch.system.pictures import colours, new_figure, save

    ours, theirs = colours(2)
    figure = new_figure(9, 5.5)
    axes = figure.subplots()
    for budget, rows in found.items():
        scores = [row["mean_of_paradigms"] for row in rows]
        label = "Cloze, each seed a dot" if budget == min(found) else None
        axes.plot([row["flops"] for row in rows], scores, "o", color=ours, alpha=0.6, label=label)
        axes.plot(rows[0]["flops"], statistics.mean(scores), "_", color=ours, markersize=18, markeredgewidth=2)
    if fit:
        flops = np.geomspace(min(found), ASKED, 100)
        scores, errors = np.array([fit.at(each) for each in flops]).T
        asked = f"{ASKED:g} FLOPs would give {scores[-1]:.1f} ± {errors[-1]:.1f}"
        axes.plot(flops, scores, "--", color=ours, linewidth=1, label=f"100 − a FLOPs^−b ± standard error: {asked}")
        axes.fill_between(flops, scores - errors, scores + errors, color=ours, alpha=0.15, linewidth=0)
    for each in PUBLISHED:
        first = each is PUBLISHED[0]
        middle = statistics.mean(each.score)
        axes.plot(each.flops, middle, "s", color=theirs, label="published, FLOPs estimated" if first else None)
        if len(each.score) > 1:
            axes.plot([each.flops] * 2, each.score, color=theirs, linewidth=2)
        right, up, alignment = each.label
        text = f"{each.name}, {each.parameters / 1e6:.0f} M"
        axes.annotate(text, (each.flops, middle), (right, up), textcoords="offset points", ha=alignment, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min([*found, 1e16]) / 2, 1e18)
    decades = range(math.ceil(math.log10(axes.get_xlim()[0])), 19)
    axes.set_xticks([10.0**power for power in decades], [f"1e{power}" for power in decades])  # without formulas
    axes.set_xlabel("FLOPs of pretraining, forward and backward")
    axes.set_ylabel("BLiMP, mean over paradigms, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")  # where neither ours nor the published points are
    save(figure, path)


def spread(values: list[float], digits: int) -> str:
    """Mean, with the deviation if there are several."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(found: dict[float, list[dict]], fit: Fit | None) -> str:
    """Markdown: a row a budget, mean and deviation over its seeds; commands; the published points; phenomena."""
    titles = ("FLOPs", "parameters", "steps", "tokens", "epochs", "core-hours a run", "seeds", "nats a character")
    lines = [[*titles, "BLiMP, paradigms", "BLiMP, phenomena"]]
    for rows in found.values():
        hours = [row["processor_seconds"] / 3600 for row in rows if row["processor_seconds"] is not None]
        first = rows[0]
        cells = [f"{first['flops']:.2e}", f"{first['parameters'] / 1e6:.1f} M", f"{first['steps']:,}"]
        cells += [f"{first['tokens'] / 1e6:.1f} M", f"{first['epochs']:.2f}", spread(hours, 2) if hours else "–"]
        cells += [", ".join(str(row["seed"]) for row in rows), spread([row["nats_per_character"] for row in rows], 4)]
        cells += [spread([row[mean] for row in rows], 2) for mean in ("mean_of_paradigms", "mean_of_phenomena")]
        lines.append(cells)
    text = markdown(lines) + (f"\n{fit}.\n" if fit else "")
    text += "\nEach row is of `" + "` or `".join(sorted({row["hardware"] for rows in found.values() for row in rows}))
    text += "`, by these commands:\n\n"
    text += "".join(f"    OMP_NUM_THREADS={rows[0]['threads']} {rows[0]['command']}\n" for rows in found.values())
    others = [["published", "parameters", "BLiMP, paradigms", "FLOPs, estimated", "how"]]
    for each in PUBLISHED:
        scores = "–".join(f"{score:.1f}" for score in each.score)
        others.append([each.name, f"{each.parameters / 1e6:.0f} M", scores, f"{each.flops:.0e}", each.estimate])
    return f"{text}\n{markdown(others)}\n{markdown(by_phenomenon(found))}"


def by_phenomenon(found: dict[float, list[dict]]) -> list[list[str]]:
    """Of a table: BLiMP's phenomena, the weakest of the largest budget first; means over each budget's seeds."""
    means = [
        {name: statistics.mean(row["phenomena"][name] for row in rows) for name in rows[0]["phenomena"]}
        for rows in found.values()
    ]
    lines = [["phenomenon, %", *(f"{rows[0]['flops']:.2e} FLOPs" for rows in found.values())]]
    for name in sorted(means[-1], key=means[-1].__getitem__):
        lines.append([name.replace("_", " "), *(f"{each[name]:.1f}" for each in means)])
    return lines


def markdown(rows: list[list[str]]) -> str:
    """A table; its first row is the header."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def quick_data(folder: Path) -> tuple[Path, Path, Path]:
    """Prepared text, held-out lines and pairs, made of the documentation that every Python has."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = found_text()[:400]
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts[20:])]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare_text(str(folder / "text.jsonl"), folder, "strict-small")
    lines, pairs = folder / "lines.txt", folder / "pairs"
    sentences = [" ".join(text.split()[:8]) for text in texts[:20]]
    lines.write_text("\n".join(sentences) + "\n")
    pairs.mkdir(exist_ok=True)
    rows = [{"sentence_good": each, "sentence_bad": " ".join(reversed(each.split()))} for each in sentences]
    for name in ("first", "second"):
        (pairs / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data, lines, pairs


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained and measured on; each comparison of scores has these."""
    parser.add_argument("--json", type=Path, required=True, help="file of the rows")
    parser.add_argument("--data", type=Path, help="shards of configs/prepare/strict-small.yaml")
    parser.add_argument("--lines", type=Path, help="held-out text: a file, or a glob")
    parser.add_argument("--blimp", type=Path, help="folder of BLiMP's files")
    parser.add_argument("--output", type=Path, help="folder of the runs")
    parser.add_argument("--every_nth", type=int, default=1, help="only every nth pair of BLiMP; for a quick look")
    parser.add_argument("--every_nth_line", type=int, default=10, help="only every nth held-out line")
    parser.add_argument("--quick", action="store_true", help="tiny, on made text: that it runs, not what it is worth")


def complete(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Make what --quick is measured on; check that all that a run needs is given."""
    if given.quick:
        if given.output is None:
            parser.error("--output: found none with --quick, expected a folder for made text and runs")
        given.every_nth_line = 1
        given.data, given.lines, given.blimp = quick_data(given.output / "made")
    missing = [name for name in ("data", "lines", "blimp", "output") if getattr(given, name) is None]
    if missing:
        parser.error(f"--{missing[0]}: found none, expected it beside --data; leave all out to see what was measured")
    given.data, given.output = given.data.resolve(), given.output.resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="FLOPs")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of the steps, instead of the recipe's")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg")
    parser.add_argument("--page", type=Path, help="folder of a results.md with the marks, for the table")
    given = parser.parse_args()
    recipes = RECIPES
    if given.quick:
        given.budgets, given.seeds, recipes = QUICK_BUDGETS, (1,), QUICK
    if given.plan:
        if given.data is None:
            parser.error("--data: found none with --plan, expected the shards")
        plans(given, recipes)
        return 0
    if given.data or given.quick:
        complete(given, parser)
        curve = Curve(given, recipes)
        with ThreadPoolExecutor(given.processes) as pool:
            list(pool.map(curve.run, [(budget, seed) for budget in given.budgets for seed in given.seeds]))
    found = shown_rows(Rows(given.json).read(), recipes)
    if not found:
        sys.exit(f"{given.json}: found no rows with the settings of now, expected some; give --data and what it needs")
    fit = Fit.of([row for rows in found.values() for row in rows])
    text = table(found, fit)
    print(text)
    if given.draw:
        draw(found, fit, given.draw)
    if given.page:
        picture = f"![BLiMP over FLOPs, ours and published]({given.draw.name})\n\n" if given.draw else ""
        put(picture + text, given.page / "results.md", MARKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
