"""Every benchmark of this folder at a size for two cores, in at most 25 minutes, and one report of them all.

    make bench                              # runs/bench/report.md, report.json, pictures
    make bench BENCH_DATA=DIR               # with corpus/books/books-00.jsonl.gz and finetune/ of a folder
    python benchmarks/run_all.py --only serving loading --output runs/bench

The table below says what runs. Without BENCH_DATA the texts are those that every Python has, or made of them. Written
after each benchmark, to --output: report.md with hardware, versions, commit, figures and pictures, report.json with the
same figures, and what each benchmark printed. A benchmark that fails, or runs out of its time or of what is left of
the 25 minutes, is named, and the exit status is 1. For figures that count nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fnmatch
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpu import run_command
from prepare import found_text
from synthetic_batches import hardware, versions

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 25
LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "pyarrow", "uvicorn", "numpy")
PAIRS = {"train": 320, "dev": 160}  # of the task that is made where no data is given


@dataclass(frozen=True)
class Entry:
    """A benchmark of the table.

    question: what it answers. arguments: behind `python benchmarks/`; FIGURES stands for the file of its figures,
    {folder} for a folder of its own, {all} for that of all, {data} for BENCH_DATA. seconds: the most that it may take.
    given, made: further arguments with BENCH_DATA, and without. written: the file of its figures below its folder,
    where that is not FIGURES. bars: patterns of the figures that are drawn. pictures: those that it draws itself.
    gpu: whether it needs one. saved: the file of what was measured before, that it draws; without it nothing is run.
    """

    question: str
    arguments: tuple[str, ...]
    seconds: int
    given: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    written: str | None = None
    bars: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    gpu: bool = False
    saved: str | None = None


BOOKS = "{data}/corpus/books/books-00.jsonl.gz"
TABLE = {
    "training_step": Entry(
        "A pretraining step against transformers', and the share of the peak",
        ("training_step.py", "--quick", "--json", "FIGURES"),
        150,
        bars=("ratio_*", "share_*"),
    ),
    "families": Entry(
        "A step of each family of encoders as a share of that of transformers' class",
        ("families.py", "--rounds", "3", "--json", "FIGURES"),
        300,
        bars=("ratio_*",),
    ),
    "overhead": Entry(
        "What engine, loop, checkpoints and a second process cost beside the step",
        ("overhead.py", "--quick", "--json", "FIGURES"),
        300,
        bars=("*",),
    ),
    "divided_optimizer": Entry(
        "An optimizer's work divided among ranks: the slowest one's as a multiple of its share",
        ("divided_optimizer.py", "--ranks", "2", "--layers", "4", "--width", "128", "--json", "FIGURES"),
        200,
        bars=("*",),
    ),
    "loading": Entry(
        "Loading on one process, against `datasets`",
        ("loading.py", "--quick", "--json", "FIGURES"),
        120,
        bars=("*ratio*",),
    ),
    "loading_ranks": Entry(
        "Loading on a rank of 1,024, against one process that reads everything",
        ("loading.py", "--quick", "--world-size", "1024", "--json", "FIGURES"),
        120,
        bars=("*ratio*",),
    ),
    "prepare": Entry(
        "Preparing, against the tokenizer that it uses",
        ("prepare.py", "--quick", "--json", "FIGURES"),
        150,
        given=("--corpus", BOOKS),
        bars=("*ratio*", "*speedup*"),
    ),
    "planning": Entry(
        "Memory that planning 10¹¹ tokens takes",
        ("planning.py", "--tokens", "1e11", "--json", "FIGURES"),
        150,
        bars=("*bytes*",),
    ),
    "plans": Entry("The tables of `cloze plan`; nothing is measured", ("plans.py",), 300),
    "activation_memory": Entry(
        "Memory of a step by gradient checkpointing, in MiB",
        ("activation_memory.py", "--sequences", "4", "--json", "FIGURES"),
        200,
        bars=("*",),
    ),
    "finetuning": Entry(
        "A fine-tuning step against transformers' Trainer",
        ("finetuning.py", "--quick", "--json", "FIGURES"),
        150,
        given=("--data", "{data}/finetune/sst2/train.tsv"),
        bars=("*ratio*",),
    ),
    "serving": Entry(
        "Requests a second with batches across requests, against one by one",
        ("serving.py", "--seconds", "5", "--rounds", "1", "--json", "FIGURES"),
        120,
        bars=("requests_per_second", "one_by_one"),
    ),
    "pretraining_curves": Entry(
        "Held-out loss of `cloze pretrain` and transformers' Trainer at equal tokens and equal time",
        ("pretraining_curves.py", "--output", "{folder}", "--steps", "80", "--every", "20", "--samples", "64"),
        540,
        given=("--text", BOOKS),
        written="curves.json",
        pictures=("curves.svg",),
    ),
    "objectives": Entry(
        "Objectives of pretraining at equal FLOPs: that they run, not what they are worth",
        ("objectives.py", "--output", "{folder}", "--size", "tiny"),
        300,
        given=("--text", "{data}/corpus/mix-10M/valid-00.jsonl.gz"),
        written="tiny/results.json",
    ),
    "rate_transfer": Entry(  # behind pretraining_curves, of which it takes the data
        "Best rates by width and parametrization: that they are found, not what they are",
        ("rate_transfer.py", "--quick", "--data", "{all}/pretraining_curves/prepared/data", "--json", "FIGURES"),
        300,
    ),
    "compute_curve": Entry(
        "BLiMP over FLOPs, fitted and drawn: that it is measured, not what it is",
        ("compute_curve.py", "--quick", "--output", "{folder}", "--draw", "{folder}/curve.svg", "--json", "FIGURES"),
        300,
        pictures=("curve.svg",),
    ),
    "ngram_baseline": Entry(
        "BLiMP by the n-grams of a text: that it is measured, not what it is",
        ("ngram_baseline.py", "--quick", "--json", "FIGURES"),
        120,
    ),
    "compute_curve_measured": Entry(
        "BLiMP over FLOPs, as the runs of days have measured it; nothing is measured",
        ("compute_curve.py", "--json", "docs/compute.json", "--draw", "{folder}/compute.svg"),
        120,
        pictures=("compute.svg",),
        saved="docs/compute.json",
    ),
    "against_run_mlm": Entry(
        "The same text and time by transformers' run_mlm: that it is measured, not what it is worth",
        (
            "against_run_mlm.py",
            "--quick",
            "--output",
            "{folder}",
            "--only",
            "cloze",
            "defaults-tiny",
            "paper-tiny",
            "--json",
            "FIGURES",
        ),
        300,
    ),
    "adapting": Entry(
        "Ways of adapting to another domain, with words added: that they run, not what they are worth",
        ("adapting.py", "--quick", "--output", "{folder}"),
        300,
        given=("--general", BOOKS),
        written="results.json",
        pictures=("adapting.svg",),
    ),
    "evidence": Entry(  # behind pretraining_curves, of whose run it takes the weights
        "Fine-tuning from those weights, from random ones, and by transformers: that it runs, not what it is worth",
        (
            "evidence.py",
            "--model",
            "{all}/pretraining_curves/cloze-pretrain",
            "--output",
            "{folder}",
            "--tasks",
            "RTE",
            "--seeds",
            "1",
            "--processes",
            "2",
        ),
        300,
        given=("--data", "{data}/finetune"),
        made=("--data", "{all}/made"),
        written="results.json",
        pictures=("spread.svg",),
    ),
    "attack": Entry(
        "Kills, hostile files and requests, and what was lost: nothing",
        ("attack.py", "--quick", "--json", "FIGURES"),
        700,
        bars=("lost",),
    ),
    "gpu": Entry(
        "What counts most of what needs a GPU",
        ("gpu.py", "--quick", "--output", "{folder}"),
        500,
        written="report.json",
        gpu=True,
    ),
}


@dataclass
class Outcome:
    """What came of an entry; status: None if its time was over."""

    status: int | None
    seconds: float
    command: str
    output: str
    figures: dict = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)
    shown: dict[str, float] = field(default_factory=dict)
    """The figures that are drawn."""

    @property
    def end(self) -> str:
        """In words."""
        return {0: "done", None: "FAILED: out of time"}.get(self.status, f"FAILED: status {self.status}")


def make_pairs(folder: Path) -> None:
    """Files of the form of RTE's: does a text say what a sentence of it, or of another one, says?"""
    from cloze.pipeline.tokenization.sentences import split

    rng = random.Random(0)
    texts = [found[:3] for found in (list(split(text)) for text in found_text()) if len(found) >= 3]
    rng.shuffle(texts)
    (folder / "rte").mkdir(parents=True, exist_ok=True)
    for name, count in PAIRS.items():
        with open(folder / "rte" / f"{name}.tsv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, escapechar="\\")
            writer.writerow(("index", "sentence1", "sentence2", "label"))
            for number in range(count):
                own, other = texts[2 * number % len(texts)], texts[(2 * number + 1) % len(texts)]
                told = rng.choice(("entailment", "not_entailment"))
                words = (" ".join(own), (own if told == "entailment" else other)[1])
                writer.writerow((number, *(" ".join(each.split()) for each in words), told))


def filled(entry: Entry, folder: Path, everything: Path, data: Path | None) -> list[str]:
    """The arguments of an entry."""
    places = {"{folder}": folder, "{all}": everything, "{data}": data}
    words = [*entry.arguments, *(entry.given if data else entry.made)]
    for place, path in places.items():
        words = [word.replace(place, str(path)) for word in words]
    return [f"benchmarks/{words[0]}", *words[1:]]


def run(name: str, entry: Entry, output: Path, data: Path | None, seconds: float) -> Outcome:
    """Run an entry; its own folder and what it printed lie in `output`."""
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    if seconds <= 0:
        return Outcome(None, 0.0, "", "no time was left for it")
    done = run_command(min(seconds, entry.seconds), filled(entry, folder, output, data))
    figures = done["figures"]
    if entry.written and (folder / entry.written).exists():
        figures = json.loads((folder / entry.written).read_text())
    (output / f"{name}.txt").write_text(done["output"])
    found = Outcome(done["status"], done["seconds"], done["command"], done["output"], figures)
    found.pictures = [f"{name}/{each}" for each in entry.pictures if (folder / each).exists()]
    found.shown = numbers(figures, entry.bars)
    if found.shown:
        draw(found.shown, entry.question, output / f"{name}.svg")
        found.pictures.append(f"{name}.svg")
    return found


def numbers(figures: dict, patterns: tuple[str, ...]) -> dict[str, float]:
    """Figures with such names; one that stands in another has both names."""
    named = [(name, name, value) for name, value in figures.items()]
    named += [
        (f"{name}: {key}", key, each)
        for name, value in figures.items()
        if isinstance(value, dict)
        for key, each in value.items()
    ]
    return {
        name: value
        for name, key, value in named
        if isinstance(value, (int, float)) and any(fnmatch.fnmatch(key, pattern) for pattern in patterns)
    }


def draw(bars: dict[str, float], title: str, path: Path) -> None:
    """A bar a figure, its value behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.32 * len(bars)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(list(bars), list(bars.values()), color="#4878a8")
    axes.bar_label(drawn, [f"{value:,.4g}" for value in bars.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.tick_params(labelsize=8)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def about(data: Path | None) -> dict:
    """Hardware, versions and commit that the figures are of."""
    git = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "hardware": f"{hardware('cpu')}, {len(os.sched_getaffinity(0))} cores, {memory / 2**30:.0f} GiB",
        "versions": f"Python {platform.python_version()}, {versions(*LIBRARIES)}",
        "commit": (git[0] or "unknown") + (" with changes" if git[1] else ""),
        "data": str(data or "made of the standard library's docstrings"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load before": round(os.getloadavg()[0], 1),
    }


def write(output: Path, facts: dict, outcomes: dict[str, Outcome], left_out: dict[str, str]) -> None:
    """Write report.md and report.json of what has run until now."""
    lines = [
        "# Benchmarks",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "| benchmark | question | end | seconds |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| [{name}](#{name}) | {TABLE[name].question} | {each.end} | {each.seconds:.0f} |"
        for name, each in outcomes.items()
    ]
    lines += [f"| {name} | {TABLE[name].question} | left out: {reason} | |" for name, reason in left_out.items()]
    for name, each in outcomes.items():
        lines += ["", f"## {name}", "", f"    python {each.command}", ""]
        lines += [f"![{name}]({picture})" for picture in each.pictures]
        if each.shown:
            lines += ["", "| figure | |", "|---|---|"]
            lines += [f"| {key} | {value:,.4g} |" for key, value in each.shown.items()]
        lines += [
            "",
            f"<details><summary>{each.end}; what it printed</summary>",
            "",
            "```",
            each.output[-8000:].replace("```", "'''").rstrip(),
            "```",
            "",
            "</details>",
        ]
    (output / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = {
        **facts,
        "left out": left_out,
        "benchmarks": {
            name: {"status": each.status, "seconds": each.seconds, "command": each.command, "figures": each.figures}
            for name, each in outcomes.items()
        },
    }
    (output / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the report")
    parser.add_argument("--data", type=Path, help="folder with corpus/books and finetune; default: texts are made")
    parser.add_argument("--only", nargs="+", choices=TABLE, metavar="NAME", help=f"of {', '.join(TABLE)}")
    options = parser.parse_args()
    output, data = options.output.resolve(), options.data and options.data.resolve()
    for place in ("corpus/books", "finetune") if data else ():
        if not (data / place).is_dir():
            print(
                f"error: --data: found no {data / place}, expected a folder; leave it away to make texts",
                file=sys.stderr,
            )
            return 2
    output.mkdir(parents=True, exist_ok=True)
    facts, outcomes, began = about(data), {}, time.monotonic()
    entries = {name: entry for name, entry in TABLE.items() if not options.only or name in options.only}
    left_out = {name: "no GPU" for name, entry in entries.items() if entry.gpu and not has_gpu()}
    for name, entry in entries.items():
        if entry.saved and not (ROOT / entry.saved).exists():
            left_out[name] = f"no {entry.saved}"
    if data is None and "evidence" in entries:
        make_pairs(output / "made")
    for name, entry in entries.items():
        if name in left_out:
            continue
        print(f"{name}: {entry.question} (at most {entry.seconds} s)", flush=True)
        outcomes[name] = run(name, entry, output, data, 60 * MINUTES - (time.monotonic() - began))
        print(f"{name}: {outcomes[name].end}, {outcomes[name].seconds:.0f} s", flush=True)
        write(output, facts | {"minutes": round((time.monotonic() - began) / 60, 1)}, outcomes, left_out)
    failed = [name for name, each in outcomes.items() if each.status != 0]
    print(
        f"{output / 'report.md'}: {len(outcomes) - len(failed)} of {len(outcomes)} done in "
        f"{(time.monotonic() - began) / 60:.1f} minutes" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
