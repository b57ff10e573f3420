"""What pretraining is worth: seven tasks from a pretrained model, from random weights, and by transformers' classes.

    python benchmarks/evidence.py --model runs/small --data finetune --output runs/evidence --processes 2 --page docs

--data holds sst2, cola, rte, sick (TSV), wnut17 (CoNLL) and xquad (SQuAD JSON). Every fine-tuning is a real `cloze
finetune` process of one thread; transformers' are of its own Trainer over its own model classes, from our export of
the same weights, with the same data, rate, batch, epochs and dropout. Seeds are done one after another over all
tasks, so that a table can be made at any time: the same command continues where it was stopped, and --table_only makes
the table of what there is. Written to --output: results.json, table.md, spread.svg; with --page the table goes into
DIR/results.md, between its marks, and the picture beside it as results.svg.

No run sees what it is measured on: every run goes to its last step, and the test file is measured where there is one
with labels (SST-2, SICK, WNUT-17), else the development file (CoLA, RTE, XQuAD).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cloze.launch.system.environment.launchers import child_variables  # noqa: E402

WAYS = {"random": "random weights", "pretrained": "pretrained", "transformers": "pretrained, by transformers"}
BATCH = 32
DROPOUT = 0.1
MARKS = "<!-- measured -->", "<!-- /measured -->"


@dataclass(frozen=True)
class Setting:
    """A task: its files in --data, how it is learned, its metric."""

    task: str  # of cloze finetune
    files: tuple[str, str, str | None]  # training, development, test
    metric: str
    name: str
    """The metric's usual name."""
    epochs: int
    rate: float
    max_length: int = 128  # positions beyond those of the pretraining data have learned nothing
    options: tuple[str, ...] = ()

    @property
    def measured(self) -> str:
        """The file that counts."""
        return self.files[2] or self.files[1]

    @property
    def split(self) -> str:
        """Where results.json holds that file's metrics."""
        return f"test/{Path(self.files[2]).name.split('.')[0]}" if self.files[2] else "validation"


_SICK = "sick/train.tsv", "sick/dev.tsv", "sick/test.tsv"
# A small model wants a higher rate than BERT-base's 2e-5 to 5e-5. As few epochs as all runs in an hour or two allow.
SETTINGS = {
    "SST-2": Setting("sst2", ("sst2/train.tsv", "sst2/dev.tsv", "sst2/test.tsv"), "accuracy", "accuracy", 3, 3e-4),
    "CoLA": Setting("cola", ("cola/train.tsv", "cola/dev.tsv", None), "matthews_correlation", "Matthews", 2, 3e-4),
    "RTE": Setting("rte", ("rte/train.tsv", "rte/dev.tsv", None), "accuracy", "accuracy", 2, 3e-4),
    "SICK entailment": Setting("sick-entailment", _SICK, "accuracy", "accuracy", 2, 3e-4),
    "SICK relatedness": Setting("sick-relatedness", _SICK, "pearson", "Pearson", 2, 3e-4),
    "WNUT-17": Setting("ner", ("wnut17/train.conll", "wnut17/dev.conll", "wnut17/test.conll"), "f1", "F1", 2, 5e-4),
    "XQuAD-en": Setting(
        "squad",
        ("xquad/en-train.json", "xquad/en-dev.json", None),
        "f1",
        "F1, %",
        1,
        5e-4,
        options=("--window_step", "64", "--max_query_tokens", "48"),
    ),
}


@dataclass(frozen=True)
class Job:
    """One process: a fine-tuning, or all of a task's by transformers, which take longer to import than to learn."""

    way: str
    name: str
    seeds: tuple[int, ...]
    folder: Path
    """Of the task's runs; seed-N/results.json is written last."""

    def result(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}" / "results.json"

    def done(self) -> list[int]:
        return [seed for seed in self.seeds if self.result(seed).exists()]

    def values(self) -> list[float]:
        """What was measured, of the runs that are done; a correlation that does not exist, of constants, is 0."""
        setting = SETTINGS[self.name]
        return [json.loads(self.result(seed).read_text())[setting.split][setting.metric] or 0.0 for seed in self.done()]

    def command(self, data: Path, start: Path) -> list[str]:
        """The process that does what is not done.

        Args:
            start: the folder of `prepare`.
        """
        setting = SETTINGS[self.name]
        if self.way == "transformers":
            left = [str(seed) for seed in self.seeds if seed not in self.done()]
            return [
                sys.executable,
                str(ROOT / "benchmarks" / "evidence_transformers.py"),
                self.name,
                "--model",
                str(start / "model"),
                "--data",
                str(data),
                "--output",
                str(self.folder),
                "--seeds",
                *left,
            ]
        model = (
            [str(start / "shape.yaml"), "--tokenizer", str(start / "tokenizer")]
            if self.way == "random"
            else [str(start / "model")]
        )
        train, development, test = (str(data / file) if file else None for file in setting.files)
        (seed,) = self.seeds
        return [
            sys.executable,
            "-m",
            "cloze",
            "finetune",
            setting.task,
            "--model",
            *model,
            "--train",
            train,
            "--validation",
            development,
            *(["--test", test] if test else []),
            "--output",
            str(self.result(seed).parent),
            "--seed",
            str(seed),
            "--dropout",
            str(DROPOUT),
            "--max_length",
            str(setting.max_length),
            "--epochs",
            str(setting.epochs),
            "--train.learning_rate",
            str(setting.rate),
            "--train.global_batch_size",
            str(BATCH),
            "--train.micro_batch_size",
            str(BATCH),
            "--evaluation.every_steps",
            "0",
            "--evaluation.keep_best",
            "false",
            "--checkpoint.every_steps",
            "0",
            *setting.options,
            *self.pooling(start),
        ]

    def pooling(self, start: Path) -> list[str]:
        """A text's vector where the model has no pooler: the mean of its tokens."""
        import yaml

        classifies = SETTINGS[self.name].task not in ("ner", "squad")
        pooler = yaml.safe_load((start / "shape.yaml").read_text())["pooler"]
        return ["--pooling", "mean"] if classifies and not pooler else []

    def run(self, data: Path, start: Path) -> str:
        """Do what has not been done; returns a line about it, also if it failed."""
        began = time.monotonic()
        if len(self.done()) < len(self.seeds):
            self.folder.mkdir(parents=True, exist_ok=True)
            said = self.folder / f"seed-{self.seeds[0]}.log"
            with open(said, "a") as log:
                status = subprocess.run(
                    self.command(data, start),
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=child_variables(OMP_NUM_THREADS="1"),
                ).returncode
            if status:
                return f"FAILED with status {status}: {said}\n{said.read_text()[-2000:]}"
            for heavy in (folder for seed in self.seeds for folder in self.result(seed).parent.glob("[cm]*/")):
                shutil.rmtree(heavy)  # checkpoints and model
        shown = " ".join(f"{value:.3f}" for value in self.values())
        return (
            f"{self.name:<18}{WAYS[self.way]:<28}seed {self.seeds[0]}  {SETTINGS[self.name].name} {shown}  "
            f"{time.monotonic() - began:.0f} s"
        )


def prepare(model: Path, output: Path, ways: list[str]) -> Path:
    """The folder that every run starts from: shape.yaml and tokenizer/ for random weights; model/, as `cloze export`
    makes it, once a way needs it: random weights need not wait for a pretraining to end.
    """
    import yaml

    from cloze.launch.run import integrity, runs
    from cloze.model.huggingface import load_pretrained

    start = output / "start"
    start.mkdir(parents=True, exist_ok=True)
    if not (start / "shape.yaml").exists():
        shutil.copytree(
            integrity.tokenizer_folder(model),
            start / "tokenizer",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.safetensors", "config.json"),
        )
        shape = runs.model_config(model) if runs.is_pretraining(model) else load_pretrained(model)[0]
        (start / "shape.yaml").write_text(yaml.safe_dump(asdict(shape)))
    if set(ways) != {"random"} and not (start / "model").exists():
        subprocess.run(
            [sys.executable, "-m", "cloze", "export", str(model), "--output", str(start / "model")],
            cwd=ROOT,
            check=True,
            env=child_variables(),
        )
    return start


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """Every process: ours seed by seed over all tasks, then transformers'."""
    seeds = range(1, arguments.seeds + 1)
    folder = arguments.output
    for seed, name in itertools.product(seeds, arguments.tasks):
        for way in ("random", "pretrained"):
            if way in arguments.ways:
                yield Job(way, name, (seed,), folder / way / name.replace(" ", "-"))
    if "transformers" in arguments.ways:
        for name in arguments.tasks:
            yield Job("transformers", name, tuple(seeds), folder / "transformers" / name.replace(" ", "-"))


def baseline(setting: Setting, data: Path) -> float:
    """The metric of always giving the most frequent label of the training file; 0 where that says nothing."""
    if setting.metric != "accuracy":
        return 0.0
    from cloze.launch.finetune.tasks import TASKS
    from cloze.launch.texts.tables import read_table

    task = TASKS[setting.task]
    train, measured = (
        [row.values[task.targets[0]] for row in read_table(data / file, task.header, task.texts[0]).rows]
        for file in (setting.files[0], setting.measured)
    )
    return measured.count(statistics.mode(train)) / len(measured)


def collect(arguments: argparse.Namespace) -> dict:
    """Values by task and way, of the runs that are done."""
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in SETTINGS}
    for job in jobs(arguments):
        found[job.name][job.way] += job.values()
    return {name: ways for name, ways in found.items() if any(ways.values())}


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    digits = 1 if max(values) > 1 else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.median(values):.{digits}f} ({statistics.mean(values):.{digits}f}{spread}, {len(values)})"


def _noise(ours: list[float], theirs: list[float]) -> str:
    """Difference of the means in its standard errors (Welch's t)."""
    if min(len(ours), len(theirs)) < 2:
        return "–"
    error = (statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs)) ** 0.5
    return f"{(statistics.mean(ours) - statistics.mean(theirs)) / error:+.1f}" if error else "0.0"


def table(results: dict, data: Path) -> str:
    """Markdown: median (mean ± standard deviation, runs) of each way."""
    lines = [
        "| task | file | metric | majority | random weights | pretrained | by `transformers` | ours − theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ways in results.items():
        setting = SETTINGS[name]
        cells = [_cell(ways[way]) for way in WAYS]
        lines.append(
            f"| {name} | {Path(setting.measured).stem} | {setting.name} | {baseline(setting, data):.3g} | "
            f"{' | '.join(cells)} | {_noise(ways['pretrained'], ways['transformers'])} |"
        )
    return "\n".join(lines) + "\n"


def settings_table() -> str:
    """Markdown: the configuration of every run of a task."""
    lines = ["| task | epochs | learning rate | longest sequence |", "|---|---|---|---|"]
    lines += [f"| {name} | {each.epochs} | {each.rate:g} | {each.max_length} |" for name, each in SETTINGS.items()]
    return "\n".join(lines) + "\n"


def draw(results: dict, path: Path) -> None:
    """Every run a dot, a panel a task, a line at the median."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cloze"  # the same picture has the same bytes
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(2 * len(results), 2.8), layout="constrained", squeeze=False)
    for panel, (name, ways) in zip(panels[0], results.items(), strict=True):
        for place, values in enumerate(ways.values()):
            panel.plot([place] * len(values), values, "o", alpha=0.6, markersize=4)
            if values:
                panel.plot([place - 0.25, place + 0.25], [statistics.median(values)] * 2, "k-", linewidth=1)
        panel.set_title(f"{name}\n{SETTINGS[name].name}", fontsize=9)
        panel.set_xticks(range(len(ways)), ["random", "pretrained", "transformers"], rotation=60, fontsize=8)
        panel.tick_params(axis="y", labelsize=8)
        panel.set_xlim(-0.5, len(ways) - 0.5)
    figure.savefig(path, metadata={"Date": None})


def write(arguments: argparse.Namespace) -> None:
    """Write the table and the picture of what is done."""
    results = collect(arguments)
    if not results:
        raise SystemExit(f"{arguments.output}: found no finished run")
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results, arguments.data)
    (arguments.output / "table.md").write_text(text)
    draw(results, arguments.output / "spread.svg")
    print(text)
    if arguments.page:
        page = arguments.page / "results.md"
        before, _, rest = page.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        measured = f"{text}\n![each run a dot](results.svg)\n\n{settings_table()}"
        page.write_text(f"{before}{MARKS[0]}\n{measured}{MARKS[1]}{after}")
        shutil.copyfile(arguments.output / "spread.svg", arguments.page / "results.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a run of cloze pretrain (its newest checkpoint), or its export")
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' files")
    parser.add_argument("--output", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each task and way, with seeds 1, 2, ...")
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="only these")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these")
    parser.add_argument("--processes", type=int, default=1, help="fine-tunings at a time")
    parser.add_argument("--page", type=Path, help="folder of a results.md with the marks, for table and picture")
    parser.add_argument("--table_only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    arguments.data, arguments.output = arguments.data.resolve(), arguments.output.resolve()
    if not arguments.table_only:
        start = prepare(arguments.model.resolve(), arguments.output, arguments.ways)
        with ThreadPoolExecutor(arguments.processes) as pool:
            for line in pool.map(lambda job: job.run(arguments.data, start), jobs(arguments)):
                print(line, flush=True)
    write(arguments)
    failed = sum(len(job.seeds) - len(job.done()) for job in jobs(arguments))
    if failed and not arguments.table_only:
        raise SystemExit(f"{failed} runs are not done; the same command tries them again")


if __name__ == "__main__":
    main()
