"""The same text and the same time: `strict-small`, and transformers' run_mlm, by BLiMP and by held-out text.

    python benchmarks/against_run_mlm.py --minutes 30 --text 'mix/train-*.jsonl.gz' --data SHARDS --lines FILE \\
        --blimp DIR --output RUNS --json docs/run_mlm.json [--only cloze fast-256] [--page docs]
    python benchmarks/against_run_mlm.py --json docs/run_mlm.json --page docs                     # what was measured

Theirs is what examples/pytorch/language-modeling/run_mlm.py does with a new RoBERTa: texts are tokenized,
concatenated and cut into 512 tokens, of which DataCollatorForLanguageModeling chooses 15%; Trainer makes the steps. The
shapes are 8 layers of 256 and that of roberta-base. Each with that script's defaults (fp32, batches of 8, AdamW, 5e-5,
linear decay without warmup); with what is fastest on this CPU and learns the same (fp32 or bf16, whichever a short
trial finds faster, memory kept by malloc; attention is SDPA and AdamW fused by default); and so with the constants of
RoBERTa's paper (arXiv 1907.11692, table 9), since 5e-5 is a rate for fine-tuning. Ours is strict-small as
benchmarks/compute_curve.py has it for a budget of --recipe FLOPs, one process on each core. Both have the vocabulary of
SHARDS, which are of --text; theirs reads all of it, ours all but the share that SHARDS hold out.

Each has all cores for so many minutes: the number of steps follows from the time of a step in a short trial, so that
the decay ends in time; the seconds that the steps took are in the row. Preparing, tokenizing, imports and trials do not
count; theirs saves no checkpoints, and begins again if it was stopped. Then both are scored by `cloze evaluate`, which
reads transformers' folder. FILE has a row for each contender and seed as soon as it has been scored; the same command
goes on behind the rows. Nothing else should run at the same time. --quick: tiny models for seconds on made text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compute_curve import (
    QUICK,
    RECIPES,
    Commands,
    Rows,
    add_data_arguments,
    command,
    complete,
    cost_of,
    digest_of,
    evaluate,
    markdown,
    measured_on,
    recipe_of,
    trained,
)
from objectives import put
from pretraining_curves import between_steps, trainer_arguments
from synthetic_batches import versions
from training_step import KEEP_PAGES

from cloze.launch.run.metrics_file import read_metrics

MARKS = "<!-- against-run-mlm -->", "<!-- /against-run-mlm -->"
LENGTH, BATCH, MASKED = 512, 8, 0.15  # of RoBERTa's tokenizer, TrainingArguments, run_mlm
# arXiv 1907.11692, table 9, base: 24k of 500k steps of warmup
PAPER = {
    "learning_rate": 6e-4,
    "warmup_steps": 24 / 500,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.0,
}
SHAPES: dict[str, dict[str, int]] = {
    "256": dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024),
    "base": {},
}
QUICK_SHAPE = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=128)
OURS = "cloze"
TRIAL_STEPS, FIRST_STEPS = 12, 3  # of theirs in a trial, and how many of these do not count
OUR_TRIAL_STEPS, OUR_LINE = 80, 10  # of ours, half next tokens and half masked ones; steps of a line of metrics
QUICK_MINUTES = 0.05


@dataclass(frozen=True)
class Contender:
    """A way of run_mlm. title: in the table. shape: of RobertaConfig. fastest: whether the precision is chosen by a
    trial, and malloc keeps pages. settings: of TrainingArguments.
    """

    title: str
    shape: dict[str, int]
    fastest: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def contenders(shapes: dict[str, dict[str, int]]) -> dict[str, Contender]:
    """All ways of run_mlm by name."""
    found = {}
    for name, shape in shapes.items():
        title = f"run_mlm, RoBERTa {'8 × 256' if name == '256' else name}"
        found[f"defaults-{name}"] = Contender(f"{title}, its defaults", shape)
        found[f"fast-{name}"] = Contender(f"{title}, its fastest", shape, True)
        found[f"paper-{name}"] = Contender(f"{title}, its fastest, constants of the paper", shape, True, PAPER)
    return found


def pack(texts: str, tokenizer_folder: Path, folder: Path) -> None:
    """The texts as run_mlm packs them, in a folder: a thousand documents at a time, whose rest is dropped."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    if folder.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def tokenize(rows: dict) -> dict:
        return dict(tokenizer(rows["text"], return_special_tokens_mask=True))

    def cut(rows: dict) -> dict:
        joined = {name: list(itertools.chain.from_iterable(values)) for name, values in rows.items()}
        length = len(joined["input_ids"])
        whole = length - length % LENGTH if length >= LENGTH else length
        return {
            name: [values[start : start + LENGTH] for start in range(0, whole, LENGTH)]
            for name, values in joined.items()
        }

    cache = folder.with_name(f"{folder.name}-cache")
    documents = load_dataset("json", data_files=texts, split="train", cache_dir=str(cache))
    tokens = documents.map(tokenize, batched=True, remove_columns=documents.column_names)
    tokens.map(cut, batched=True).save_to_disk(folder)


def new_model(shape: dict[str, int], tokenizer: Any) -> Any:
    """RobertaForMaskedLM with random weights and roberta-base's configuration, but for the shape and the vocabulary."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1}
    roles = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.cls_token_id}
    roles["eos_token_id"] = tokenizer.sep_token_id
    return RobertaForMaskedLM(RobertaConfig(**sizes, **roles, layer_norm_eps=1e-5, **shape))


def train_theirs(shape: dict[str, int], settings: dict, steps: int, seed: int, folders: dict[str, str]) -> None:
    """Trainer's run; writes model and tokenizer to a folder, with trained.json beside them.

    Args:
        folders: packed text, tokenizer, and run.
    """
    import datasets
    import pyarrow.compute
    import transformers

    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["tokenizer"])
    model, run = new_model(shape, tokenizer), Path(folders["run"])
    ends: list[float] = []

    text = datasets.load_from_disk(folders["packed"])
    trainer = transformers.Trainer(
        model,
        trainer_arguments(run, seed, max_steps=steps, **settings),
        train_dataset=text,
        processing_class=tokenizer,
        callbacks=[between_steps(lambda step: ends.append(time.perf_counter()))],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED),
    )
    trainer.train()
    trainer.save_model(str(run))
    first = min(FIRST_STEPS, steps - 1)
    lengths = pyarrow.compute.list_value_length(text.data.column("input_ids"))  # 512 each, but for a tiny text's
    tokens = steps * BATCH * pyarrow.compute.mean(lengths).as_py()
    found = {
        "steps": steps,
        "seconds": ends[-1] - ends[0],
        "step_seconds": (ends[-1] - ends[first]) / (steps - first),
        "tokens": round(tokens),
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    (run / "trained.json").write_text(json.dumps(found) + "\n")


class Comparison:
    """The contenders of a command line.

    Args:
        given: the command line.
        ways: of run_mlm.
    """

    def __init__(self, given: argparse.Namespace, ways: dict[str, Contender]) -> None:
        self._given, self._ways = given, ways
        self._rows, self._commands = Rows(given.json), Commands()
        self._cores = len(os.sched_getaffinity(0))
        self._recipe = QUICK[0.0] if given.quick else recipe_of(given.recipe, RECIPES)
        pack(given.text, given.data / "tokenizer", given.output / "packed")

    def run(self, name: str, seed: int) -> None:
        """Train, score and write a row, unless it stands in the file."""
        given = self._given
        way = asdict(self._recipe if name == OURS else self._ways[name])
        key = {"contender": name, "way": way, "minutes": given.minutes, "seed": seed, "data": digest_of(given.data)}
        key |= {"every_nth": given.every_nth, "every_nth_line": given.every_nth_line}
        if self._rows.find(**key):
            return
        folder = given.output / f"{name}-{given.minutes:g}-minutes-seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        found = (self._train_ours if name == OURS else self._train_theirs)(name, seed, folder)
        scores = evaluate(folder / "run", folder, given, self._commands, self._cores)
        row = key | found | {"tokens_per_second": round(found["tokens"] / found["seconds"], 1)} | scores
        row |= measured_on() | {"versions": versions("torch", "transformers")}
        self._rows.add(row)
        print(
            f"{name}, seed {seed}: {row['steps']:,} steps, {row['seconds']:.0f} s, BLiMP {row['mean_of_paradigms']}, "
            f"{row['nats_per_character']} nats a character",
            flush=True,
        )

    def _train_ours(self, name: str, seed: int, folder: Path) -> dict:
        cost, ended = cost_of(self._recipe, self._given.data), folder / "ended.json"
        if not ended.exists():
            lines = {"train.log_every_steps": OUR_LINE, "evaluation.samples": 64}
            trial = folder / "trial"
            if not (folder / "trial.json").exists():
                self._pretrain(cost.plan(OUR_TRIAL_STEPS).options | lines, seed, trial, folder)
                each = [line["speed/step_seconds"] for line in read_metrics(trial) if "speed/step_seconds" in line]
                halves = each[1 : len(each) // 2], each[len(each) // 2 + 1 :]  # without the first of each
                mean = statistics.mean(map(statistics.mean, halves))
                (folder / "trial.json").write_text(json.dumps({"step_seconds": mean}))
            step_seconds = json.loads((folder / "trial.json").read_text())["step_seconds"]
            plan = cost.plan(max(2, round(60 * self._given.minutes / step_seconds)))
            self._pretrain(plan.options, seed, folder / "run", folder)
            seconds, tokens = trained(folder / "run")
            shown = command(plan.options | {"seed": seed}, "DATA", "RUN")
            content: dict[str, Any] = {
                "parameters": plan.parameters,
                "steps": plan.steps,
                "epochs": round(plan.epochs, 3),
            }
            content |= {"seconds": round(seconds, 1), "tokens": tokens, "trial_step_seconds": step_seconds}
            content |= {"command": shlex.join([*self._start("cloze"), "pretrain", *shown])}
            ended.write_text(json.dumps(content))
        return json.loads(ended.read_text())

    def _start(self, program: str) -> list[str]:
        """The command that starts a process on each core."""
        return ["torchrun", "--nproc-per-node", str(self._cores), "-m", program] if self._cores > 1 else [program]

    def _pretrain(self, options: dict, seed: int, run: Path, folder: Path) -> None:
        words = command(options | {"seed": seed}, str(self._given.data), str(run))
        starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(self._cores)] if self._cores > 1 else []
        words = [sys.executable, *starter, "-m", "cloze", "pretrain", *words]
        self._commands.run(words, folder / "log.txt", OMP_NUM_THREADS="1")

    def _train_theirs(self, name: str, seed: int, folder: Path) -> dict:
        way, ended = self._ways[name], folder / "ended.json"
        if not ended.exists():
            kinds = ({}, {"bf16": True}) if way.fastest else ({},)
            trials = []
            for place, kind in enumerate(kinds):
                trial = folder / f"trial-{place}"
                self._trainer(way, way.settings | kind, TRIAL_STEPS, seed, trial, folder)
                trials.append(json.loads((trial / "trained.json").read_text())["step_seconds"])
            settings = way.settings | kinds[trials.index(min(trials))]
            steps = max(2, round(60 * self._given.minutes / min(trials)))
            self._trainer(way, settings, steps, seed, folder / "run", folder)
            content = json.loads((folder / "run" / "trained.json").read_text())
            del content["step_seconds"]
            content |= {"settings": settings, "trial_step_seconds": trials}
            ended.write_text(json.dumps(content))
        return json.loads(ended.read_text())

    def _trainer(self, way: Contender, settings: dict, steps: int, seed: int, run: Path, folder: Path) -> None:
        """Train in a process of its own, unless it is done."""
        if (run / "trained.json").exists():
            return
        folders = {"packed": str(self._given.output / "packed"), "tokenizer": str(self._given.data / "tokenizer")}
        content = {"shape": way.shape, "settings": settings, "steps": steps, "seed": seed}
        content["folders"] = folders | {"run": str(run)}
        variables = {"OMP_NUM_THREADS": str(self._cores)} | (KEEP_PAGES if way.fastest else {})
        words = [sys.executable, __file__, "--worker", json.dumps(content)]
        self._commands.run(words, folder / "log.txt", **variables)


def table(rows: list[dict], ways: dict[str, Contender]) -> str:
    """Markdown: a row a contender and seed, then where it was measured and by which commands."""
    lines = [["", "parameters", "steps", "tokens", "minutes", "nats a character", "BLiMP, paradigms", "phenomena"]]
    names = [OURS, *ways]
    rows = sorted((row for row in rows if row["contender"] in names), key=lambda row: names.index(row["contender"]))
    for row in rows:
        name = "**`strict-small`**" if row["contender"] == OURS else ways[row["contender"]].title
        seed = f", seed {row['seed']}" if row["seed"] != 1 else ""
        part = f"; every {row['every_nth']}th pair" if row["every_nth"] > 1 else ""
        cells = [f"{name}{', bf16' if row.get('settings', {}).get('bf16') else ''}{seed}{part}"]
        cells += [f"{row['parameters'] / 1e6:.1f} M", f"{row['steps']:,}", f"{row['tokens'] / 1e6:.1f} M"]
        cells += [f"{row['seconds'] / 60:.1f}", f"{row['nats_per_character']:.4f}"]
        lines.append([*cells, f"{row['mean_of_paradigms']:.2f}", f"{row['mean_of_phenomena']:.2f}"])
    where = sorted({f"{row['hardware']}; {row['versions']}" for row in rows})
    commands = [f"    OMP_NUM_THREADS=1 {row['command']}\n" for row in rows if "command" in row]
    return f"{markdown(lines)}\nMeasured on {'; '.join(where)}. Ours:\n\n{''.join(commands)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    parser.add_argument("--text", help="glob of the JSON lines that the shards are made of")
    parser.add_argument("--minutes", type=float, default=30, help="of training, for each contender")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--recipe", type=float, default=3e14, help="FLOPs whose recipe ours takes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join([OURS, *contenders(SHAPES)])}")
    parser.add_argument("--page", type=Path, help="folder of a results.md with the marks, for the table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    if "--worker" in sys.argv:
        train_theirs(**json.loads(sys.argv[sys.argv.index("--worker") + 1]))
        return 0
    given = parser.parse_args()
    ways = contenders({"tiny": QUICK_SHAPE} if given.quick else SHAPES)
    if unknown := set(given.only or ()) - {OURS, *ways}:
        parser.error(f"--only: found {', '.join(sorted(unknown))}, expected of {', '.join([OURS, *ways])}")
    if given.data or given.quick:
        complete(given, parser)
        if given.quick:
            given.text, given.minutes = str(given.output / "made" / "text.jsonl"), QUICK_MINUTES
        if given.text is None:
            parser.error("--text: found none, expected the texts that the shards are made of")
        comparison = Comparison(given, ways)
        for seed, name in itertools.product(given.seeds, given.only or [OURS, *ways]):
            comparison.run(name, seed)
    rows = Rows(given.json).read()
    if not rows:
        sys.exit(f"{given.json}: found no rows, expected some; give --data and what it needs")
    text = table(rows, ways)
    print(text)
    if given.page:
        put(text, given.page / "results.md", MARKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
