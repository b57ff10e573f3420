"""What each objective of pretraining is worth at equal compute: masked tokens, pairs, ELECTRA, spans, a teacher.

    python benchmarks/objectives.py --text 'mix/train-*.jsonl.gz' --data finetune --output runs/objectives --size small

Every contender trains a model of one shape on one text with as many FLOPs: those of forward and backward that the
objective counts of its own models (`Objective.flops`: ELECTRA's generator and the teacher's forward among them), so
that a dearer objective makes fewer steps. The teacher of the distillation has twice the layers and was trained with
four times the FLOPs, which are not counted; it has a row of its own. Optimizer, rate, batch, length and seed are the
same for all and were tuned for none. Then each model is fine-tuned by `benchmarks/evidence.py` (which says how:
--data as there), as is a model of random weights; size `small` is not. Of every model the mean vectors of its last
layer are compared with SICK's test file as they are: Spearman's correlation of cosines with scores. What is done is
not done again, so that the same command continues where it was stopped. Written to --output: results.json, table.md;
with --page the table goes into DIR/results.md, between its marks.

CPU minutes are those of the pretraining process that has reached the end. The held-out loss is that of masked tokens,
on the same samples with the same masks for all; ELECTRA's discriminator predicts none.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from prepare import found_text  # noqa: E402

from cloze.launch.system.environment.launchers import child_variables  # noqa: E402

MARKS = "<!-- objectives -->", "<!-- /objectives -->"
BATCH, LENGTH, SEED = 64, 64, 42


@dataclass(frozen=True)
class Size:
    """How large a comparison is."""

    layers: int
    width: int
    flops: float
    """Of each contender."""
    tasks: tuple[str, ...]
    """Of evidence.py."""
    seeds: int


SIZES = {
    "tiny": Size(2, 64, 2e9, (), 0),
    "small": Size(4, 128, 5e12, (), 0),
    "medium": Size(4, 128, 2e13, ("SICK relatedness", "WNUT-17"), 3),
    "large": Size(8, 256, 2e15, ("SST-2", "CoLA", "RTE", "SICK entailment", "SICK relatedness", "WNUT-17"), 5),
}


@dataclass(frozen=True)
class Contender:
    """A run of pretraining."""

    title: str
    options: tuple[str, ...] = ()
    pairs: bool = False
    """Whether its data are pairs of segments."""
    deeper: int = 1
    """Times as many layers."""
    dearer: int = 1
    """Times as many FLOPs."""
    teacher: str | None = None
    """The contender that it is shown."""


CONTENDERS = {
    "masked": Contender("masked tokens"),
    "next-sentence": Contender("masked tokens and next sentences", pairs=True),
    "span-boundary": Contender(
        "span boundaries (SpanBERT)", ("--objective", "span_boundary", "--masking.strategy", "span")
    ),
    "replaced-tokens": Contender("replaced tokens (ELECTRA)", ("--objective", "replaced_tokens")),
    "teacher": Contender("its teacher: masked tokens, twice the layers, four times the FLOPs", deeper=2, dearer=4),
    "distillation": Contender("distillation (DistilBERT)", ("--objective", "distillation"), teacher="teacher"),
}


def cloze(*words: str) -> float:
    """Run a command with one thread; returns the CPU seconds that it has taken."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "cloze", *words], check=True, cwd=ROOT, env=child_variables(OMP_NUM_THREADS="1")
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def prepare_text(texts: str | None, output: Path) -> None:
    """The text as single sequences and as pairs, by one vocabulary; masks are drawn when it is read."""
    if texts is None:
        lines = (json.dumps({"id": str(number), "text": text}) for number, text in enumerate(found_text()))
        (output / "text.jsonl").write_text("".join(line + "\n" for line in lines))
    words = ["--config", "strict-small", "--input", texts or str(output / "text.jsonl")]
    if not (output / "vocabulary/tokenizer.json").exists():
        cloze("vocab", *words, "--output", str(output / "vocabulary"))
    shared = [
        *words,
        "--tokenizer",
        str(output / "vocabulary"),
        "--max_length",
        str(LENGTH),
        "--samples.pair_sets",
        "1",
        "--masking.mask_share",
        "0.8",
        "--masking.random_share",
        "0.1",
    ]
    for name, options in (
        ("single", ["--samples.single_share", "0"]),
        ("pairs", ["--samples.objective", "next_sentence", "--samples.single_share", "0"]),
    ):
        if not (output / name / "manifest.json").exists():
            cloze("prepare", *shared, *options, "--output", str(output / name))


def command(name: str, size: Size, output: Path) -> list[str]:
    """Arguments of `cloze pretrain` for a contender, without its number of steps."""
    contender, heads = CONTENDERS[name], max(1, size.width // 64)
    words = [
        "pretrain",
        "--config",
        "strict-small",
        "--data",
        str(output / ("pairs" if contender.pairs else "single")),
        "--output",
        str(output / "runs" / name),
        "--seed",
        str(SEED),
        "--model.num_hidden_layers",
        str(size.layers * contender.deeper),
        "--model.hidden_size",
        str(size.width),
        "--model.num_attention_heads",
        str(heads),
        "--model.intermediate_size",
        str(3 * size.width),
        "--model.type_vocab_size",
        "2",
        "--train.global_batch_size",
        str(BATCH),
        "--train.micro_batch_size",
        str(BATCH),
        "--masking.rate",
        "0.15",
        "--masking.final_rate",
        "null",
        "--masking.change_begins",
        "0",
        "--masking.next_tokens_until",
        "0",
        "--schedule.name",
        "linear",
        "--schedule.warmup_steps",
        "0",
        "--schedule.warmup_share",
        "0.05",
        "--evaluation.every_steps",
        "0",
        "--evaluation.samples",
        "2048",
        "--checkpoint.every_steps",
        "0",
        "--monitor.inspect_every_steps",
        "0",
        "--monitor.examples",
        "0",
        *contender.options,
    ]
    if contender.pairs:
        words += ["--evaluation.sets.single", str(output / "single")]
    if name == "replaced-tokens":
        words += ["--model.embedding_size", str(size.width)]
    if contender.teacher:
        kept = range(1, 2 * size.layers, 2)
        words += [
            "--objective_options.teacher",
            str(output / "runs" / contender.teacher),
            "--init_from",
            str(output / "runs" / contender.teacher),
            "--init_layers",
            str(list(kept)),
        ]
    return words


def steps_for(words: list[str], flops: float) -> tuple[int, float]:
    """The steps that take so many FLOPs, at least one, and the tokens of a step; by the first batches of the run."""
    from cloze.launch.commands import parse
    from cloze.launch.system.environment.process import prepare_process

    prepare_process()
    from cloze.launch.pretrain.inputs import open_inputs
    from cloze.launch.pretrain.schedules import run_masking
    from cloze.model.flops import TokenCounts
    from cloze.pipeline.loading.batches import BatchStream
    from cloze.pipeline.shards.reader import ShardReader

    run = open_inputs(parse("pretrain", words[1:]), 1)
    reader = ShardReader(run.data.manifest.folder, "train")
    stream = BatchStream(
        reader,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        rank=0,
        world_size=1,
        seed=SEED,
        streams=run.config.data_streams,
        masking=run_masking(run.config, run.data),
    )
    batches = [next(stream) for _ in range(16)]
    stream.close()
    mean = statistics.mean(
        run.objective.flops(TokenCounts.of_micro_batch(micro)) for batch in batches for micro in batch.micro_batches
    )
    return max(1, round(flops / mean)), statistics.mean(batch.num_tokens for batch in batches)


def train(name: str, size: Size, output: Path) -> dict:
    """Train a contender, unless it is done; what was measured of it."""
    run, measured = output / "runs" / name, output / "runs" / f"{name}.json"
    if not measured.exists():
        words = command(name, size, output)
        steps, tokens = steps_for(words, size.flops * CONTENDERS[name].dearer)
        seconds = cloze(*words, "--train.max_steps", str(steps))
        measured.write_text(
            json.dumps(
                {
                    "steps": steps,
                    "tokens": steps * tokens,
                    "cpu_seconds": seconds,
                    "loss": held_out_loss(run, CONTENDERS[name].pairs),
                }
            )
            + "\n"
        )
    return json.loads(measured.read_text())


def held_out_loss(run: Path, pairs: bool) -> float | None:
    """Of masked tokens of single sequences, at the end of a run; None for ELECTRA."""
    from cloze.launch.run.metrics_file import read_metrics
    from cloze.launch.run.runs import fields_of

    if fields_of(run)["objective"] == "replaced_tokens":
        return None
    curve = "validation/mlm_loss" + ("/single" if pairs else "")
    return [line[curve] for line in read_metrics(run) if curve in line][-1]


def finetune(model: Path, way: str, arguments: argparse.Namespace, size: Size, folder: Path) -> dict[str, list[float]]:
    """Values by task, each seed one."""
    if not size.tasks:
        return {}
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks/evidence.py"),
            "--model",
            str(model),
            "--data",
            str(arguments.data),
            "--output",
            str(folder),
            "--seeds",
            str(size.seeds),
            "--ways",
            way,
            "--tasks",
            *size.tasks,
        ],
        check=True,
        env=child_variables(OMP_NUM_THREADS="1"),
    )
    return {task: ways[way] for task, ways in json.loads((folder / "results.json").read_text()).items()}


def similarity(run: Path, data: Path, drawn: bool = False) -> float:
    """Spearman's correlation of the scores of SICK's test file with cosines of mean vectors of a run's encoder, or
    (`drawn`) of one with random weights."""
    import numpy as np
    from scipy.stats import spearmanr

    from cloze.launch.finetune.tasks import TASKS
    from cloze.launch.predict.predictor import Predictor
    from cloze.launch.texts.tables import read_table
    from cloze.model.initialization import init_weights

    encoder = Predictor.from_folder(run)
    if drawn:
        init_weights(encoder.model, SEED)
    task = TASKS["sick-relatedness"]
    rows = [row.values for row in read_table(data / "sick/test.tsv", task.header, task.texts[0]).rows]
    first, second = (
        encoder.embed([row[column] for row in rows], pooling="mean") for column in ("sentence_A", "sentence_B")
    )
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    scores = [float(row["relatedness_score"]) for row in rows]
    return float(spearmanr((first * second).sum(1) / lengths, scores).statistic)


def table(results: dict[str, dict], size: Size) -> str:
    """Markdown: a row a contender, of tasks the mean over the seeds and their standard deviation."""
    names = {
        "SST-2": "SST-2, accuracy",
        "CoLA": "CoLA, Matthews",
        "RTE": "RTE, accuracy",
        "WNUT-17": "WNUT-17, F1",
        "SICK entailment": "SICK, accuracy",
        "SICK relatedness": "SICK, Pearson",
    }
    vectors = any("vectors" in found for found in results.values())
    header = [
        "objective",
        "steps",
        "tokens",
        "CPU minutes",
        "held-out loss",
        *["SICK, vectors"] * vectors,
        *(names[task] for task in size.tasks),
    ]
    rows = [header, ["---"] * len(header)]
    for title, found in results.items():
        pretrained = "steps" in found
        loss = found.get("loss")
        cells = (
            [
                f"{found['steps']:,}",
                f"{found['tokens'] / 1e6:.2f} M",
                f"{found['cpu_seconds'] / 60:.1f}",
                "–" if loss is None else f"{loss:.3f}",
            ]
            if pretrained
            else ["–"] * 4
        )
        if vectors:
            cells.append(f"{found['vectors']:.3f}")
        for task in size.tasks:
            values = found["tasks"][task]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        rows.append([title, *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def put(text: str, page: Path, marks: tuple[str, str] = MARKS) -> None:
    """The table into the page, between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    if not rest:
        raise SystemExit(f"{page}: found no {marks[0]}, expected the marks between which the table stands")
    after = rest.partition(marks[1])[2]
    page.write_text(f"{before}{marks[0]}\n{text}{marks[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text",
        help="glob of JSON lines, as configs/prepare/strict-small.yaml reads; without it the "
        "docstrings of the standard library",
    )
    parser.add_argument("--data", type=Path, help="folder of the tasks' files, as benchmarks/evidence.py has it")
    parser.add_argument("--output", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--size", choices=SIZES, default="small", help="shape, FLOPs, tasks and seeds")
    parser.add_argument("--page", type=Path, help="folder of a results.md with the marks, for the table")
    arguments = parser.parse_args()
    size, output = SIZES[arguments.size], arguments.output.resolve() / arguments.size
    if size.tasks and arguments.data is None:
        parser.error(f"--data: found none, expected the folder of the tasks' files: size {arguments.size} fine-tunes")
    if arguments.data and not (arguments.data / "sick/test.tsv").exists():
        parser.error(f"--data: found no sick/test.tsv in {arguments.data}, expected the folder of the tasks' files")
    (output / "runs").mkdir(parents=True, exist_ok=True)
    prepare_text(arguments.text, output)
    results: dict[str, dict] = {}
    for name, contender in CONTENDERS.items():
        results[contender.title] = train(name, size, output)
        print(contender.title, results[contender.title], flush=True)
    for name, contender in CONTENDERS.items():
        results[contender.title]["tasks"] = finetune(
            output / "runs" / name, "pretrained", arguments, size, output / "tasks" / name
        )
    random = finetune(output / "runs" / "masked", "random", arguments, size, output / "tasks" / "random")
    if arguments.data:
        for name, contender in CONTENDERS.items():
            results[contender.title]["vectors"] = similarity(output / "runs" / name, arguments.data)
        drawn = {"tasks": random, "vectors": similarity(output / "runs" / "masked", arguments.data, drawn=True)}
        results = {"random weights": drawn, **results}
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results, size)
    (output / "table.md").write_text(text)
    print(text)
    if arguments.page:
        put(text, arguments.page / "results.md")


if __name__ == "__main__":
    main()
