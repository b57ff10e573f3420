"""Held-out loss against tokens and against time: `cloze pretrain` and transformers' Trainer, on the same batches.

    python benchmarks/pretraining_curves.py --text 'books-*.jsonl.gz' --output runs/curves --steps 1000 [--threads 2]

The texts are prepared by `cloze vocab` and `cloze prepare --config books-modern` (masks drawn at load time); --data
takes what these have written, and without both the text is the docstrings of the standard library. All begin with the
same weights of ModernBERT's architecture (4 layers of 256: configs/pretrain/small-modern.yaml) and take the same
batches of 32 samples, which is checked by their tokens, with AdamW of the same constants, clipping, warmup and linear
decay. Masks are drawn by each one's own procedure at the same rate: by `DataCollatorForLanguageModeling`, which pads,
and by Cloze. All are measured alike every --every steps: by Cloze's model, on the same held-out samples with the same
masks. The time of measuring and saving does not count; that of fetching and collating does. The contenders run one
after another, each in a process of its own; nothing else should run at the same time. Written to --output: curves.json,
curves.svg; a contender whose curve lies there is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import found_text
from synthetic_batches import hardware
from training_step import KEEP_PAGES

from cloze.launch.system.environment.launchers import child_variables
from cloze.pipeline.loading.order import choose_streams

ROOT = Path(__file__).resolve().parents[1]
BATCH = 32
RATE, BETAS, WARMUP_SHARE = 2e-3, (0.9, 0.98), 0.02  # those of configs/pretrain/small-modern.yaml
SEED = 42
CONTENDERS = {  # name -> (library, settings of TrainingArguments, environment)
    "cloze pretrain": ("cloze", {}, {}),
    "transformers Trainer, its defaults": ("transformers", {}, {}),
    "transformers Trainer, bf16, fused, malloc": (
        "transformers",
        {"bf16": True, "optim": "adamw_torch_fused"},
        KEEP_PAGES,
    ),
}


def prepare_text(texts: str | None, folder: Path, config: str = "books-modern") -> Path:
    """The prepared folder of a glob of texts, or of the text that every Python has; by a name in configs/prepare/."""
    if (folder / "data" / "manifest.json").exists():
        return folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    if texts is None:
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in found_text()))
    words = ["--config", config, "--input", texts or str(folder / "text.jsonl")]
    for command in (
        ["vocab", *words, "--output", str(folder / "vocabulary")],
        ["prepare", *words, "--tokenizer", str(folder / "vocabulary"), "--output", str(folder / "data")],
    ):
        if command[0] == "prepare" or not (folder / "vocabulary" / "tokenizer.json").exists():
            subprocess.run([sys.executable, "-m", "cloze", *command], check=True, env=child_variables())
    return folder / "data"


def start_model(data: Path, folder: Path) -> None:
    """The weights that all begin with, as a folder that both libraries read."""
    from cloze.launch.commands import parse
    from cloze.launch.system.environment.process import prepare_process

    prepare_process()
    from cloze.launch.pretrain.data import check_manifest
    from cloze.launch.pretrain.first_model import build_model
    from cloze.pipeline.shards.manifest import Manifest

    config = parse("pretrain", ["--config", "small-modern", "--data", str(data), "--output", str(folder)])
    shape = check_manifest(Manifest.load(data), config.model, None)
    build_model(replace(config, model=shape, seed=SEED)).save(folder, data / "tokenizer")


def run_cloze(data: Path, start: Path, run: Path, steps: int, every: int) -> None:
    """A run whose checkpoints are kept, so that each can be measured afterwards."""
    command = [
        sys.executable,
        "-m",
        "cloze",
        "pretrain",
        "--config",
        "small-modern",
        "--data",
        str(data),
        "--output",
        str(run),
        "--init_from",
        str(start),
        "--seed",
        str(SEED),
        "--data_streams",
        str(choose_streams([BATCH], 1)),
        "--train.time_budget_hours",
        "null",
        "--train.max_steps",
        str(steps),
        "--train.global_batch_size",
        str(BATCH),
        "--train.micro_batch_size",
        str(BATCH),
        "--train.learning_rate",
        str(RATE),
        "--schedule.warmup_share",
        str(WARMUP_SHARE),
        "--train.log_every_steps",
        str(every),
        "--evaluation.every_steps",
        "0",
        "--evaluation.samples",
        "32",
        "--checkpoint.every_steps",
        str(every),
        "--checkpoint.keep_last",
        str(steps // every + 1),
        "--monitor.inspect_every_steps",
        "0",
    ]
    subprocess.run(command, check=True, cwd=ROOT)


def cloze_curve(data: Path, run: Path, samples: int) -> list[dict]:
    from cloze.launch.pretrained.loading import load_model
    from cloze.launch.run.metrics_file import read_metrics

    curve, seconds, before = [], 0.0, 0
    for line in read_metrics(run):
        if "speed/step_seconds" in line:
            seconds += line["speed/step_seconds"] * (line["step"] - before)
            before = line["step"]
            loss = held_out_loss(load_model(run, before).model, data, samples)
            curve.append({"step": before, "tokens": line["data/tokens"], "seconds": seconds, "loss": loss})
    return curve


def held_out_loss(model, data: Path, samples: int) -> float:
    """Mean loss of the masked tokens of the first held-out samples, in fp32, with masks that are always the same."""
    import torch

    from cloze.pipeline.loading.batches import evaluation_batches
    from cloze.pipeline.shards.reader import ShardReader

    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in evaluation_batches(
            ShardReader(data, "validation"),
            micro_batch_size=BATCH,
            rank=0,
            world_size=1,
            max_samples=samples,
            segments=model.config.segments,
        ):
            batch.pop("next_sentence_label", None)
            output = model(**batch)
            total += float(output.mlm_losses.sum())
            count += int(output.num_masked)
    return total / count


def trainer_arguments(run: Path, seed: int, **settings):
    """TrainingArguments of a run that keeps no checkpoints and reports to nobody."""
    import torch
    from transformers import TrainingArguments

    quiet = dict(save_strategy="no", report_to="none", disable_tqdm=True)
    return TrainingArguments(str(run), seed=seed, use_cpu=not torch.cuda.is_available(), **quiet, **settings)


def between_steps(call: Callable[[int], object]):
    """A callback of Trainer that calls with the number of steps done: before the first step, and after each one."""
    from transformers import TrainerCallback

    class Between(TrainerCallback):
        def on_train_begin(self, arguments, state, control, **_):
            call(state.global_step)

        def on_step_end(self, arguments, state, control, **_):
            call(state.global_step)

    return Between()


def run_transformers(data: Path, start: Path, run: Path, steps: int, every: int, samples: int, settings: dict) -> None:
    """Trainer with its collator over Cloze's samples, in their order; the curve is written at the end."""
    import numpy as np
    import torch
    import transformers

    from cloze.launch.pretrained.loading import load_model
    from cloze.pipeline.loading.streams import SampleStreams
    from cloze.pipeline.shards.reader import ShardReader

    reader = ShardReader(data, "train")
    streams = choose_streams([BATCH], 1)
    stream = SampleStreams(reader, streams, SEED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    model = transformers.AutoModelForMaskedLM.from_pretrained(start)
    curve, clock, tokens = [], {"seconds": 0.0}, [0]  # tokens: after so many batches; some are fetched ahead

    class Samples(torch.utils.data.IterableDataset):
        def __iter__(self):
            for position in range(0, steps * BATCH, BATCH):
                found = stream.read(range(streams), position, BATCH // streams).samples
                tokens.append(tokens[-1] + len(found.input_ids))
                for low, high in zip(found.offsets, found.offsets[1:], strict=False):
                    yield {"input_ids": found.input_ids[low:high].astype(np.int64).tolist()}

    began = 0.0

    def measure(step: int) -> None:
        nonlocal began
        if step % every:
            return
        if step:
            clock["seconds"] += time.perf_counter() - began
            model.save_pretrained(run / "now")
            tokenizer.save_pretrained(run / "now")
            loss = held_out_loss(load_model(run / "now").model, data, samples)
            curve.append({"step": step, "tokens": tokens[step], **clock, "loss": loss})
            print(curve[-1], flush=True)
        began = time.perf_counter()

    trainer = transformers.Trainer(
        model,
        trainer_arguments(
            run,
            SEED,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            warmup_steps=WARMUP_SHARE,
            max_steps=steps,
            lr_scheduler_type="linear",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=1e-6,
            weight_decay=0.01,
            max_grad_norm=1.0,
            logging_steps=every,
            **settings,
        ),
        train_dataset=Samples(),
        callbacks=[between_steps(measure)],
        data_collator=transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=reader.manifest.masking["rate"]
        ),
    )
    trainer.train()
    (run / "curve.json").write_text(json.dumps(curve) + "\n")


def check_batches(curves: dict[str, list[dict]]) -> None:
    """That all have taken the same batches: as many tokens at each step. Raises SystemExit."""
    steps = {name: [(point["step"], point["tokens"]) for point in curve] for name, curve in curves.items()}
    ours = steps["cloze pretrain"]
    for name, theirs in steps.items():
        if theirs != ours:
            raise SystemExit(
                f"{name}: found other steps and tokens than those of cloze pretrain ({theirs[-1]}, "
                f"{ours[-1]} at the end), expected the same batches; remove the folder for a new run"
            )


def draw(curves: dict[str, list[dict]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (name, unit, label) in zip(
        figure.subplots(1, 2, sharey=True),
        (("tokens", 1e6, "million tokens"), ("seconds", 60, "minutes of training")),
        strict=True,
    ):
        for contender, curve in curves.items():
            axes.plot([point[name] / unit for point in curve], [point["loss"] for point in curve], label=contender)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out masked loss, nats")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def compare(curves: dict[str, list[dict]]) -> dict[str, float]:
    """Against the best of theirs: the difference of the last losses, and ours over their time to their last loss."""
    import numpy as np

    ours = curves["cloze pretrain"]
    others = {name: curve for name, curve in curves.items() if name != "cloze pretrain"}
    best = min(others.values(), key=lambda curve: curve[-1]["loss"])
    losses = np.minimum.accumulate([point["loss"] for point in ours])
    reached = float(np.interp(-best[-1]["loss"], -losses, [point["seconds"] for point in ours]))
    fastest = min(curve[-1]["seconds"] for curve in others.values())
    return {
        "loss_difference_at_equal_tokens": ours[-1]["loss"] - best[-1]["loss"],
        "time_ratio_at_equal_tokens": fastest / ours[-1]["seconds"],
        "time_ratio_to_their_last_loss": best[-1]["seconds"] / reached if losses[-1] <= best[-1]["loss"] else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="GLOB", help="texts; default: docstrings of the standard library")
    source.add_argument("--data", type=Path, help="prepared folder, masks drawn at load time")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs, the figures and the picture")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each contender")
    parser.add_argument("--every", type=int, help="steps between two measurements; default: a twentieth of them")
    parser.add_argument("--samples", type=int, default=1024, help="held-out samples")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each contender")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = options.every or max(1, options.steps // 20)
    options.steps -= options.steps % every
    options.output = options.output.resolve()
    data = options.data.resolve() if options.data else prepare_text(options.text, options.output / "prepared")
    start = options.output / "start"
    if options.worker:
        library, settings, _ = CONTENDERS[options.worker]
        run = options.output / options.worker.replace(" ", "-").replace(",", "")
        if library == "cloze":
            run_cloze(data, start, run, options.steps, every)
            (run / "curve.json").write_text(json.dumps(cloze_curve(data, run, options.samples)) + "\n")
        else:
            run_transformers(data, start, run, options.steps, every, options.samples, settings)
        return
    if not start.exists():
        start_model(data, start)
    curves = {}
    for name, (_, _, variables) in CONTENDERS.items():
        found = options.output / name.replace(" ", "-").replace(",", "") / "curve.json"
        if not found.exists():
            shutil.rmtree(found.parent, ignore_errors=True)
            words = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
            subprocess.run(
                words,
                check=True,
                env=child_variables(OMP_NUM_THREADS=str(options.threads), TOKENIZERS_PARALLELISM="false", **variables),
            )
        curves[name] = json.loads(found.read_text())
    check_batches(curves)
    title = f"{hardware('cpu')}, {options.threads} threads"
    print(title, *(f"{name}: {curve[-1]}" for name, curve in curves.items()), sep="\n")
    figures = compare(curves)
    print(json.dumps(figures, indent=1))
    (options.output / "curves.json").write_text(json.dumps({"title": title, **figures, "curves": curves}) + "\n")
    draw(curves, options.output / "curves.svg", title)


if __name__ == "__main__":
    main()
