"""What adapting an encoder to text of another domain is worth, and how its new words should start.

    python benchmarks/adapting.py --general 'books-00.jsonl.gz' 'wiki-00.jsonl.gz' --output runs/adapting --page docs

A base model with a WordPiece vocabulary of its own is trained on general text (--general: globs of JSON lines with the
field `text`, of each of which the first megabytes are taken; without it, part of Python's documentation, which then is
no part of the other domain). It is adapted, with configs/pretrain/adapt.yaml, to Python's own documentation: the topics
of its language reference and the docstrings of its library, as `cloze quickstart` collects them. The ways: not at all;
the new text alone; with a fifth of general text (replay); with replay and a vocabulary that `cloze vocab --extend` has
extended on the new text, whose rows start in the ways of `--init_vocabulary`; with replay and a vocabulary of the new
text alone, as large as the base model's (`--init_vocabulary transplant`). All have equal FLOPs of training
(`model/flops.py`), so that a larger vocabulary makes fewer steps; batch, rate and schedule are the same for all and
were tuned for none. All is in fp32.

Measured by `cloze evaluate --suite lines` on held-out lines of 40 to 240 characters of both domains, in nats per
character; and by `cloze finetune classification`: which of eight packages of the library a paragraph of docstrings is
from. Of the paragraphs, 15% are held out of everything; repeated ones are dropped. There is one base model; the seeds
are those of the adaptation and of the fine-tuning.

Each command runs in a fork of this process, with one thread. What is done is not done again, so that the same command
continues where it was stopped. Written to --output: results.json, table.md, adapting.svg; with --page the table goes
into DIR/adapt.md, between its marks, and the other two to DIR/adapt.json and DIR/adapt.svg. --draw takes the results
from DIR/adapt.json, and runs nothing.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import hashlib
import json
import os
import statistics
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork has none of the threads

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from objectives import put  # noqa: E402

from cloze.launch.tools.quickstart import documentation  # noqa: E402

MARKS = "<!-- adapting -->", "<!-- /adapting -->"
LENGTH, BATCH, MASKED = 64, 32, 0.2  # MASKED: configs/prepare/books-modern.yaml's rate
LABELS = 8
HELD_OUT = 0.15
RATE = 1e-3  # of the adaptation: half of the base model's, since it is so short
LINE = (40, 240)  # characters of the lines that are scored


@dataclass(frozen=True)
class Size:
    """How large a comparison is."""

    layers: int
    width: int
    vocabulary: int
    added: int
    """Tokens that the vocabulary is extended by."""
    megabytes: float
    """Of each source of general text."""
    base_steps: int
    steps: int
    """Of the adaptation with the base model's vocabulary."""
    lines: int
    """Held-out lines of each domain."""
    examples: int
    """Of each label, to fine-tune on."""
    seeds: int


SIZES = {
    "quick": Size(1, 64, 1024, 50, 0.3, 4, 2, 8, 4, 1),
    "full": Size(2, 128, 4096, 500, 6.0, 900, 300, 150, 120, 3),
}


@dataclass(frozen=True)
class Way:
    """A way of adapting."""

    title: str
    replay: bool = True
    rows: str | None = None
    """--init_vocabulary of another vocabulary; None: the base model's vocabulary."""

    @property
    def vocabulary(self) -> str:
        """Name of its folder."""
        return {None: "vocabulary", "transplant": "other"}.get(self.rows, "extended")


WAYS = {
    "continued": Way("new text alone", replay=False),
    "replay": Way("with replay"),
    "mean": Way("words added, rows `mean`, with replay", rows="mean"),
    "random": Way("words added, rows `random`, with replay", rows="random"),
    "mean_all": Way("words added, rows `mean_all`, with replay", rows="mean_all"),
    "transplant": Way("vocabulary of the new text, `transplant`, with replay", rows="transplant"),
}
NOTHING = "nothing"
MEASURES = {  # name -> (title, whether less is better)
    "own": ("new domain, nats per character", True),
    "general": ("general text, nats per character", True),
    "accuracy": ("task of the domain, accuracy", False),
}
COMPARED = (
    ("replay", "continued"),
    ("mean", "replay"),
    ("mean", "random"),
    ("mean", "mean_all"),
    ("transplant", "replay"),
    ("transplant", "mean"),
)


def import_once() -> None:
    """Import what the commands need, so that no fork does."""
    from cloze.launch.system.environment.process import fewer_imports, prepare_process

    prepare_process()
    with fewer_imports():
        import torch._dynamo  # noqa: F401  # an optimizer imports it at its first use

        import cloze.launch.evaluate.command
        import cloze.launch.finetune.command
        import cloze.launch.pretrain.command  # noqa: F401


def run(*words: str) -> float:
    """Run a command of Cloze in a fork of this process; returns the CPU seconds that it has taken.

    Raises:
        SystemExit: it has failed.
    """
    sys.stdout.flush()
    process = os.fork()
    if not process:
        from cloze.launch.cli import main as command

        status = 1
        try:
            status = command(list(words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"cloze {words[0]} ended with status {os.waitstatus_to_exitcode(status)}: {' '.join(words)}")
    return used.ru_utime + used.ru_stime


def share(text: str) -> float:
    """A number from 0 to 1 that depends on the text alone, by which texts are held out and ordered."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def general_texts(patterns: list[str] | None, megabytes: float) -> Iterator[str]:
    """The first texts of each source; without any, the documentation that is not of the domain."""
    if not patterns:
        yield from (text for name, text in documentation() if not in_domain(name, False))
        return
    for pattern in patterns:
        if not (paths := sorted(glob.glob(pattern))):
            raise SystemExit(f"--general: found no file {pattern}, expected JSON lines with the field text")
        left = megabytes * 1e6
        for path in paths:
            with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
                for line in file:
                    if left <= 0:
                        break
                    text = json.loads(line)["text"]
                    left -= len(text)
                    yield text


def in_domain(name: str, general: bool) -> bool:
    """Whether a module or topic is of the domain: all are if general text was given, else those of packages."""
    return general or "/" in name


def write_texts(arguments: argparse.Namespace, size: Size, folder: Path) -> None:
    """The text of both domains, their held-out lines, and the examples of the task."""
    if (folder / "train.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    general = list(general_texts(arguments.general, size.megabytes))
    rest, lines = held_out([(str(number), text.split("\n")) for number, text in enumerate(general)], size)
    write(folder / "general.jsonl", rest)
    (folder / "general-held-out.txt").write_text("\n".join(lines) + "\n")
    seen: set[str] = set()
    modules = []
    for name, text in documentation():
        if in_domain(name, bool(arguments.general)):
            parts = [" ".join(part.split()) for part in text.split("\n\n")]
            parts = [part for part in dict.fromkeys(parts) if part and part not in seen]
            seen.update(parts)
            modules.append((name, parts))
    rest, lines = held_out(modules, size)
    write(folder / "own.jsonl", rest)
    (folder / "own-held-out.txt").write_text("\n".join(lines) + "\n")
    write_task(modules, size, folder)


def held_out(documents: list[tuple[str, list[str]]], size: Size) -> tuple[list[dict], list[str]]:
    """The documents without their held-out paragraphs, and the first of these of the right length."""
    rest = [{"text": "\n\n".join(part for part in parts if share(part) >= HELD_OUT)} for _, parts in documents]
    lines = {part.strip() for _, parts in documents for part in parts if share(part) < HELD_OUT}
    fitting = sorted((line for line in lines if LINE[0] <= len(line) <= LINE[1]), key=share)
    return [row for row in rest if row["text"].strip()], fitting[: size.lines]


def write_task(modules: list[tuple[str, list[str]]], size: Size, folder: Path) -> None:
    """Paragraphs and the package that each is from, of the packages with the most; the held-out ones for validation."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, parts in modules:
        if "/" in name:
            found[name.split("/")[0]] += [part for part in parts if LINE[0] <= len(part) <= LINE[1]]
    packages = sorted(found, key=lambda package: -len(found[package]))[:LABELS]
    for file, held in (("dev", True), ("train", False)):
        rows = []
        for package in packages:
            parts = sorted((part for part in found[package] if (share(part) < HELD_OUT) == held), key=share)
            rows += [{"text": part, "label": package} for part in parts[: size.examples]]
        write(folder / f"{file}.jsonl", rows)


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(size: Size, output: Path) -> None:
    """The three vocabularies, and both texts by each."""
    text = output / "text"
    words = ["--config", "books-modern", "--max_length", str(LENGTH)]
    texts = {name: ["--input", str(text / f"{name}.jsonl")] for name in ("own", "general")}
    whole = ["--vocab_size", str(size.vocabulary)]
    vocabularies = {
        "vocabulary": [*texts["general"], *whole],
        "extended": [*texts["own"], "--extend", str(output / "vocabulary"), "--vocabulary.add", str(size.added)],
        "other": [*texts["own"], *whole],
    }
    for vocabulary, how in vocabularies.items():
        tokenizer, sources = output / vocabulary, "sources:\n"
        if not (tokenizer / "tokenizer.json").exists():
            run("vocab", *words, *how, "--output", str(tokenizer))
        for (name, source), weight in zip(texts.items(), (4, 1), strict=True):
            data = output / f"{vocabulary}-{name}"
            if not (data / "manifest.json").exists():
                run("prepare", *words, *source, "--tokenizer", str(tokenizer), "--output", str(data))
            sources += f"  - {{name: {name}, path: {data}, weight: {weight}}}\n"
        (output / f"{vocabulary}.yaml").write_text(sources)


FEW = ["--evaluation.samples", "32", "--monitor.inspect_every_steps", "0", "--monitor.examples", "0"]
BATCHES = ["--train.global_batch_size", str(BATCH), "--train.micro_batch_size", str(BATCH), "--train.precision", "fp32"]


def train_base(size: Size, output: Path) -> float:
    """Train the base model unless it is done; its CPU seconds. It learns next tokens first, as strict-small does."""
    measured = output / "base.json"
    if not measured.exists():
        seconds = run(
            *["pretrain", "--config", "strict-small", "--output", str(output / "base")],
            *["--data", str(output / "vocabulary-general"), *FEW, *BATCHES],
            *["--model.num_hidden_layers", str(size.layers), "--model.hidden_size", str(size.width)],
            *["--model.num_attention_heads", str(size.width // 64), "--model.intermediate_size", str(3 * size.width)],
            *["--train.max_steps", str(size.base_steps), "--train.learning_rate", "2e-3"],
            *["--masking.next_tokens_until", str(size.base_steps * BATCH * LENGTH * 2 // 5)],
            *["--schedule.warmup_steps", str(max(1, size.base_steps // 50))],
            *["--evaluation.every_steps", "0", "--checkpoint.every_steps", str(size.base_steps // 4)],
        )
        measured.write_text(json.dumps({"cpu_seconds": seconds}) + "\n")
    return json.loads(measured.read_text())["cpu_seconds"]


def steps_of(way: Way, size: Size) -> int:
    """Steps that take as many FLOPs as those of the base model's vocabulary."""
    from cloze.model.config import BertConfig
    from cloze.model.flops import TokenCounts, training_flops

    counts = TokenCounts.of_lengths([LENGTH] * BATCH, BATCH * LENGTH * MASKED)
    costs = [
        training_flops(
            BertConfig(
                vocab_size=entries,
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.width // 64,
                intermediate_size=3 * size.width,
                gated_feed_forward=True,
            ),
            counts,
        )
        for entries in (size.vocabulary, size.vocabulary + (size.added if way.vocabulary == "extended" else 0))
    ]
    return max(1, round(size.steps * costs[0] / costs[1]))


def adapt(name: str, seed: int, size: Size, output: Path) -> dict[str, float]:
    """Adapt with a seed and score held-out lines, unless it is done; what was found."""
    seed = 1 if name == NOTHING else seed  # the base model is one
    folder = output / "runs" / f"{name}-{seed}"
    measured, model = folder / "found.json", model_of(name, seed, output)
    if measured.exists():
        return json.loads(measured.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, float] = {}
    if name != NOTHING:
        way = WAYS[name]
        data = output / (f"{way.vocabulary}.yaml" if way.replay else f"{way.vocabulary}-own")
        found["steps"] = steps_of(way, size)
        found["cpu_seconds"] = run(
            *["pretrain", "--config", "adapt", "--data", str(data), "--output", str(model), *FEW, *BATCHES],
            *["--init_from", str(output / "base"), "--init_vocabulary", way.rows or "mean", "--seed", str(seed)],
            *["--train.max_steps", str(found["steps"]), "--train.learning_rate", str(RATE)],
            *["--evaluation.every_steps", "0", "--evaluation.keep_best", "false", "--evaluation.metric", "loss"],
            *["--evaluation.patience", "null", "--checkpoint.every_steps", "0"],
        )
    for domain in ("own", "general"):
        scores = score(model, output / "text" / f"{domain}-held-out.txt", folder / f"{domain}.json")
        found |= {domain: scores["nats"], f"{domain}_tokens": scores["tokens"]}
    measured.write_text(json.dumps(found) + "\n")
    return found


def model_of(name: str, seed: int, output: Path) -> Path:
    """The run that a way and a seed have led to."""
    return output / "base" if name == NOTHING else output / "runs" / f"{name}-{seed}" / "adapted"


def score(model: Path, data: Path, path: Path) -> dict[str, float]:
    """Nats per character and tokens per word (as white space has them) of the lines of a file."""
    run(
        "evaluate",
        str(model),
        "--suite",
        "lines",
        "--data",
        str(data),
        "--max_length",
        str(LENGTH),
        "--json",
        str(path),
    )
    scored = json.loads(path.read_text())
    words = len(data.read_text().split())
    return {"nats": -scored["log_likelihood_per_character"], "tokens": scored["tokens"] / words}


def fine_tune(name: str, seed: int, output: Path) -> float:
    """Accuracy on the held-out examples after the last step, unless it is done."""
    data, folder = output / "text", output / "runs" / f"{name}-{seed}" / "tuned"
    if not (folder / "results.json").exists():
        run(
            *["finetune", "classification", "--config", "small-models", "--model", str(model_of(name, seed, output))],
            *["--train", str(data / "train.jsonl"), "--validation", str(data / "dev.jsonl"), "--output", str(folder)],
            *["--text_columns", "text", "--label_columns", "label", "--max_length", str(LENGTH), "--seed", str(seed)],
            *["--train.precision", "fp32"],
        )
    return json.loads((folder / "results.json").read_text())["validation"]["accuracy"]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measures_of(results: dict) -> dict[str, tuple[str, bool]]:
    """What all runs have been measured by."""
    runs = [each for runs in results["ways"].values() for each in runs]
    return {name: about for name, about in MEASURES.items() if all(name in each for each in runs)}


def table(results: dict) -> str:
    """Markdown: a row a way, the mean over the seeds ± their standard deviation; then what was compared."""
    measures = measures_of(results)
    titles = ["way", "steps", "CPU seconds", "tokens per word", *(title for title, _ in measures.values())]
    rows = [titles, ["---"] * len(titles)]
    for name, runs in results["ways"].items():
        cells = [str(runs[0].get("steps", "–"))]
        cells.append(f"{statistics.mean(each['cpu_seconds'] for each in runs):.0f}" if "steps" in runs[0] else "–")
        cells.append(f"{runs[0]['own_tokens']:.2f}")
        for measure in measures:
            values = [each[measure] for each in runs]
            one = name == NOTHING and measure != "accuracy"  # the base model is one
            cells.append(f"{values[0]:.3f}" if one else f"{statistics.mean(values):.3f} ± {spread(values):.3f}")
        rows.append([NOTHING if name == NOTHING else WAYS[name].title, *cells])
    compared = [["difference", *titles[4:]], ["---"] * (1 + len(measures))]
    for first, second in COMPARED:
        if first in results["ways"] and second in results["ways"]:
            cells = [difference(results["ways"][first], results["ways"][second], measure) for measure in measures]
            compared.append([f"{WAYS[first].title} − {WAYS[second].title}", *cells])
    lines = ["".join("| " + " | ".join(row) + " |\n" for row in each) for each in (rows, compared)]
    return "\n".join(lines)


def difference(first: list[dict], second: list[dict], measure: str) -> str:
    """Of the means; in bold if it exceeds the standard deviation of the seeds of both."""
    sides = [[each[measure] for each in runs] for runs in (first, second)]
    found = statistics.mean(sides[0]) - statistics.mean(sides[1])
    noise = max(map(spread, sides))
    shown = f"{found:+.3f}".replace("-", "−")
    return f"**{shown}**" if len(sides[0]) > 1 and abs(found) > noise else f"{shown} (noise)"


def draw(results: dict, path: Path) -> None:
    """A panel a measure, a row a way, a dot a seed."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "cloze"  # the same picture has the same bytes
    names = list(results["ways"])
    figure = Figure(figsize=(11, 1 + 0.35 * len(names)), layout="constrained")
    measures = measures_of(results)
    panels = figure.subplots(1, len(measures), sharey=True)
    for axes, (measure, (title, less)) in zip(panels, measures.items(), strict=True):
        for place, name in enumerate(names):
            values = [each[measure] for each in results["ways"][name]]
            axes.plot(values, [place] * len(values), "o", color="#4878a8", alpha=0.6, markersize=5)
            axes.plot([statistics.mean(values)] * 2, [place - 0.3, place + 0.3], "k-", linewidth=1)
        axes.set_title(f"{title}\n({'less' if less else 'more'} is better)", fontsize=9)
        axes.set_yticks(range(len(names)), [NOTHING if name == NOTHING else WAYS[name].title for name in names])
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def show(results: dict, folder: Path) -> None:
    """The table into the folder's adapt.md, and the picture beside it."""
    draw(results, folder / "adapt.svg")
    put(f"{table(results)}\n![each seed a dot](adapt.svg)\n", folder / "adapt.md", MARKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--general", nargs="+", metavar="GLOB", help="JSON lines of general text")
    parser.add_argument("--output", type=Path, help="folder of all runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these, besides nothing")
    parser.add_argument("--no_task", action="store_true", help="fine-tune nothing")
    parser.add_argument("--quick", action="store_true", help="at toy size: that it runs, not what it is worth")
    parser.add_argument(
        "--page", type=Path, help="folder of an adapt.md with the marks, for table, figures and picture"
    )
    parser.add_argument("--draw", action="store_true", help="take the results from the page's adapt.json")
    arguments = parser.parse_args()
    if arguments.draw:
        if arguments.page is None:
            parser.error("--page: found none with --draw, expected the folder of adapt.json")
        show(json.loads((arguments.page / "adapt.json").read_text()), arguments.page)
        return
    if arguments.output is None:
        parser.error("--output: found none, expected the folder of all runs")
    import_once()
    size, output = SIZES["quick" if arguments.quick else "full"], arguments.output.resolve()
    write_texts(arguments, size, output / "text")
    prepare(size, output)
    results: dict = {"size": size.__dict__, "base_cpu_seconds": train_base(size, output)}
    ways: dict[str, list[dict]] = {NOTHING: []} | {name: [] for name in arguments.ways}
    for seed in range(1, size.seeds + 1):
        for name, runs in ways.items():
            runs.append(adapt(name, seed, size, output))
            print(name, seed, runs[-1], flush=True)
    if not arguments.no_task:
        for seed in range(1, size.seeds + 1):
            for name, runs in ways.items():
                runs[seed - 1]["accuracy"] = fine_tune(name, seed, output)
    results["ways"] = ways
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (output / "table.md").write_text(table(results))
    draw(results, output / "adapting.svg")
    print(table(results))
    if arguments.page:
        (arguments.page / "adapt.json").write_text(json.dumps(results, indent=1) + "\n")
        show(results, arguments.page)


if __name__ == "__main__":
    main()
