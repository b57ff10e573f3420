"""A fine-tuning step of `cloze finetune` against that of transformers' Trainer, on the same texts in the same batches.

    python benchmarks/finetuning.py [--quick] [--data TRAIN.tsv] [--json FILE] [--threads 1] [--rounds 5]

Both fine-tune the same exported model (4 layers of 256, random weights, dropout 0.1) on the same sentences in batches
of 32, and everything that belongs to a step is counted: fetching and collating the batch, forward, backward, clipping,
AdamW, schedule and log. A turn is one pass over the sentences, so that every contender computes the same real tokens
however it sorts them: Trainer can put sentences of like length together (`group_by_length`), which makes other batches
than a random order does, and is measured both ways. Each is a process of its own, they take turns, and the medians are
compared. Sentences are those
of the docstrings that every Python has, or with --data the column `sentence` of a file like SST-2's.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import found_text
from pretraining_curves import between_steps
from synthetic_batches import SHAPES, command_line, hardware, own_command
from training_step import KEEP_PAGES

VOCABULARY = 8192
BATCH = 32
STEPS_A_TURN = 50  # Trainer sorts by length within 50 batches (transformers, LengthGroupedSampler)
QUICK_STEPS = 16  # of which it sorts within 4, so that it pads a little more
WORDS = 3, 45  # of a sentence: the range of all but 1% of SST-2's
DEFAULT = "transformers Trainer, its defaults"
SAME_BATCHES = "transformers Trainer, bf16, fused, malloc, eager"  # at its best on batches drawn at random, like ours
RANDOM = {"bf16": True, "optim": "adamw_torch_fused"}
BY_LENGTH = RANDOM | {"train_sampling_strategy": "group_by_length"}
CONTENDERS = {  # name -> (library, settings, environment)
    DEFAULT: ("transformers", {}, {}),
    "transformers Trainer, all padded to the longest": ("transformers", {"pad_all": True}, {}),
    "transformers Trainer, bf16, fused AdamW": ("transformers", RANDOM, {}),
    SAME_BATCHES: ("transformers", RANDOM | {"attention": "eager"}, KEEP_PAGES),
    "transformers Trainer, bf16, fused AdamW, by length": ("transformers", BY_LENGTH, {}),
    "transformers Trainer, by length, malloc keeps pages": ("transformers", BY_LENGTH, KEEP_PAGES),
    "transformers Trainer, by length, malloc, eager": ("transformers", BY_LENGTH | {"attention": "eager"}, KEEP_PAGES),
    "cloze finetune --train.precision fp32": ("cloze", {"precision": "fp32"}, {}),
    "cloze finetune": ("cloze", {}, {}),
}
WORKERS = {"dataloader_num_workers": 4}
GPU_CONTENDERS = {
    DEFAULT: ("transformers", {}, {}),
    "transformers Trainer, bf16, fused, by length": ("transformers", BY_LENGTH | WORKERS, {}),
    "transformers Trainer, the same, compiled": ("transformers", BY_LENGTH | WORKERS | {"torch_compile": True}, {}),
    "cloze finetune": ("cloze", {}, {}),
}
QUICK = DEFAULT, SAME_BATCHES, "transformers Trainer, by length, malloc, eager", "cloze finetune"


def contenders(device: str) -> dict:
    return CONTENDERS if device == "cpu" else GPU_CONTENDERS


def sentences(data: str | None, count: int) -> list[str]:
    """So many of a file or of docstrings."""
    if data:
        with open(data, encoding="utf-8", newline="") as file:
            found = [row["sentence"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    else:
        from cloze.pipeline.tokenization.sentences import split

        found = [" ".join(sentence.split()) for text in found_text() for sentence in split(text)]
        found = [sentence for sentence in found if WORDS[0] <= len(sentence.split()) <= WORDS[1]]
    if len(found) < count:
        raise SystemExit(f"{data}: found {len(found)} sentences, expected at least {count}")
    return random.Random(0).sample(found, count)


def make_model(folder: Path, texts: list[str]) -> None:
    """The model's folder, as `cloze export` writes it, with a vocabulary of these texts; and train.tsv in it."""
    from cloze.model.bert import BertForPreTraining
    from cloze.model.config import BertConfig
    from cloze.model.initialization import init_weights
    from cloze.pipeline.config import PrepareConfig
    from cloze.pipeline.jobs.vocabulary import train_vocabulary

    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    config = PrepareConfig(input=[str(folder / "texts.txt")], output=str(folder / "tokenizer"), vocab_size=VOCABULARY)
    tokenizer = train_vocabulary(config)
    model = BertForPreTraining(BertConfig(vocab_size=tokenizer.vocab_size, **SHAPES["small"]))
    init_weights(model, 0)
    model.save(folder / "model", folder / "tokenizer")
    rows = [f"{text}\t{number % 2}\n" for number, text in enumerate(texts)]
    for name, lines in (("train", rows), ("few", rows[: 2 * BATCH])):  # a run evaluates before its first step
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines), encoding="utf-8")


class Turns:
    """Waits for a line on standard input before each turn, and answers with its seconds, by the clock and of CPU."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._began = steps, -1, (0.0, 0.0)

    def step(self) -> None:
        """Called between two steps, and before the first."""
        self._done += 1
        if self._done % self._steps:
            return
        self._wait()
        if self._done:
            print(time.perf_counter() - self._began[0], time.process_time() - self._began[1], flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # measured enough: what a run does at its end is of no interest
        self._began = time.perf_counter(), time.process_time()

    @staticmethod
    def _wait() -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def run_cloze(folder: Path, settings: dict, turns: Turns) -> None:
    """The loop of `cloze finetune`, between whose steps `turns` stands."""
    from cloze.launch.system.environment.process import prepare_process

    environment = prepare_process()
    from cloze.launch.config import CheckpointConfig, EvaluationConfig, FinetuneConfig, TrainConfig
    from cloze.launch.finetune.examples.base import ExampleStream
    from cloze.launch.finetune.finetuning_run import Finetuning
    from cloze.launch.finetune.job import read_job
    from cloze.launch.run.heartbeat import Heartbeat
    from cloze.launch.run.preemption import StopRequest
    from cloze.launch.system import distributed
    from cloze.launch.system.console import Console
    from cloze.launch.training.process import Process
    from cloze.launch.training.start import Training

    train = TrainConfig(
        max_steps=1_000_000, global_batch_size=BATCH, micro_batch_size=BATCH, log_every_steps=50, **settings
    )
    job = read_job(
        FinetuneConfig(
            "sst2",
            *(str(folder / name) for name in ("model", "train.tsv", "few.tsv", f"run-{os.getpid()}")),
            epochs=None,
            train=train,
            checkpoint=CheckpointConfig(every_steps=0),
            evaluation=EvaluationConfig(every_steps=0),
        )
    )
    device = distributed.initialize(environment)
    with Heartbeat(Path(job.config.output), environment, job.config.monitor) as heartbeat:
        training = Training(Finetuning(job, environment.rank), Process(environment, device, Console(False), heartbeat))
        stream = iter(ExampleStream(job.train, BATCH, BATCH, 0, 1, 0, 0))

        def batches():
            while True:
                turns.step()
                yield next(stream)

        training.loop(None, StopRequest(None)).run(batches())


def run_transformers(folder: Path, settings: dict, turns: Turns) -> None:
    """transformers' Trainer, between whose steps `turns` stands."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    settings = dict(settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=2, attn_implementation=settings.pop("attention", None)
    )
    rows = [line.rsplit("\t", 1) for line in (folder / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    padding = {"padding": "longest"} if settings.pop("pad_all", False) else {}
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=128, **padding)
    dataset = [
        {name: values[number] for name, values in encoded.items()} | {"labels": int(label)}
        for number, (_, label) in enumerate(rows)
    ]

    arguments = transformers.TrainingArguments(
        str(folder / f"run-{os.getpid()}"),
        per_device_train_batch_size=BATCH,
        learning_rate=3e-5,
        warmup_steps=0.1,
        max_steps=1_000_000,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )
    between = between_steps(lambda step: turns.step())
    trainer = transformers.Trainer(
        model, arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=[between]
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()


def worker(name: str, folder: Path, device: str, threads: int, steps: int) -> None:
    import torch

    torch.set_num_threads(threads)
    library, settings, _ = contenders(device)[name]
    run = run_cloze if library == "cloze" else run_transformers
    run(folder, settings, Turns(steps))


def variables(name: str, device: str) -> dict[str, str]:
    """Environment variables of a contender's process."""
    return contenders(device)[name][2] | {"TOKENIZERS_PARALLELISM": "false"}


def worker_command(name: str, folder: Path, device: str, threads: int, steps: int) -> list[str]:
    options = {"worker": name, "folder": str(folder), "device": device, "threads": str(threads), "steps": str(steps)}
    return [sys.executable, __file__, *itertools.chain(*((f"--{key}", value) for key, value in options.items()))]


def turn(name: str, process: subprocess.Popen) -> tuple[float, float]:
    """Seconds of one turn of a contender, by the clock and of CPU."""
    process.stdin.write("turn\n")
    process.stdin.flush()
    while answer := process.stdout.readline():
        try:
            wall, cpu = map(float, answer.split())
            return wall, cpu
        except ValueError:  # whatever a library has to say
            print(answer, end="")
    raise SystemExit(f"{name}: the process ended with status {process.wait()}")


def measure(
    folder: Path, device: str, threads: int, steps: int, rounds: int, names: list[str], cpu_time: bool
) -> dict[str, float]:
    """Median seconds of a step for each contender, which take turns; a first turn of each warms up."""
    processes = {}
    for name in names:  # all start at once: importing takes longer than measuring
        processes[name] = subprocess.Popen(
            worker_command(name, folder, device, threads, steps),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables(name, device),
        )
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, process in processes.items():
            taken = turn(name, process)
            if number:
                seconds[name].append(taken[cpu_time] / steps)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four contenders, shorter turns: about a minute")
    parser.add_argument(
        "--cpu_time", action="store_true", help="count CPU seconds: for one thread on a machine that is shared"
    )
    parser.add_argument("--data", metavar="FILE", help="TSV with a column `sentence`; default: sentences of docstrings")
    parser.add_argument(
        "--json", metavar="FILE", help="write ratio_to_transformers_default, _best and _same_batches there"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each contender")
    parser.add_argument("--rounds", type=int, help="measured turns of each contender; default: 5, quick: 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device is None:
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.worker:
        return worker(arguments.worker, arguments.folder, arguments.device, arguments.threads, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        report(arguments, Path(folder))


def report(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure, print a table, write the figures."""
    names = list(QUICK if arguments.quick and arguments.device == "cpu" else contenders(arguments.device))
    steps = QUICK_STEPS if arguments.quick else STEPS_A_TURN
    make_model(folder, sentences(arguments.data, steps * BATCH))
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    seconds = measure(folder, arguments.device, arguments.threads, steps, rounds, names, arguments.cpu_time)
    print(own_command("transformers", "torch"))
    print(f"{hardware(arguments.device)}, {arguments.threads} threads\n")
    print(f"{'':<56}{'s a step':>9}{'sentences/s':>13}{'ratio':>7}")
    for name, taken in seconds.items():
        print(f"{name:<56}{taken:9.4f}{BATCH / taken:13,.0f}{seconds[DEFAULT] / taken:7.2f}")
    ours = min(value for name, value in seconds.items() if name.startswith("cloze"))
    best = min(value for name, value in seconds.items() if name.startswith("transformers"))
    figures = {"ratio_to_transformers_default": seconds[DEFAULT] / ours, "ratio_to_transformers_best": best / ours}
    if SAME_BATCHES in seconds:
        figures["ratio_to_transformers_same_batches"] = seconds[SAME_BATCHES] / ours
    print("\n" + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    print("A contender's process, and its settings (of TrainingArguments, of TrainConfig):")
    for name in names:
        command = worker_command(name, folder, arguments.device, arguments.threads, steps)
        print(f"  {command_line(command, variables(name, arguments.device))}")
        print(f"    {contenders(arguments.device)[name][1]}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
