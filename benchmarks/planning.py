"""How much memory does a run of 2 × 10¹² tokens take in the process that plans it, and in Dask's scheduler?

    python benchmarks/planning.py --tokens 2e12 --json figures.json
    python benchmarks/planning.py --tokens 2e12 --executor dask      # a scheduler and a worker, processes of their own

The run is real up to its tasks, which return at once what tasks of such a corpus would report, and write nothing but
empty files where parts would be: plain files of 400 MB, stage 1, the rounds of exchange, shards of `--target_tokens`,
the manifest. Peaks of resident memory, as the kernel counts them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from synthetic_batches import own_command

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cloze.pipeline.config import PrepareConfig, ShardsConfig, SourceConfig  # noqa: E402
from cloze.pipeline.jobs import identity  # noqa: E402
from cloze.pipeline.jobs import prepare as preparing  # noqa: E402
from cloze.pipeline.jobs.build_stage import BuildTask, ShardReport  # noqa: E402
from cloze.pipeline.jobs.exchange_stage import ExchangeTask  # noqa: E402
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, Report, TokenizeTask, part_name  # noqa: E402
from cloze.pipeline.progress import Progress  # noqa: E402
from cloze.pipeline.readers.files import InputFile, Segment  # noqa: E402
from cloze.pipeline.shards.manifest import ShardInfo  # noqa: E402
from cloze.pipeline.tokenization.backends import wordpiece_backend  # noqa: E402
from cloze.pipeline.tokenization.tokenizer import Tokenizer  # noqa: E402

FILE_BYTES, SEGMENT_BYTES = 400 << 20, 64 << 20
BYTES_A_TOKEN = 4.0  # of text
DOCUMENT_TOKENS = 500
VOCABULARY = 30522
SHARD_TOKENS = 1.33  # in samples, for each of the text
NAMES = {"pad": "[PAD]", "unknown": "[UNK]", "classification": "[CLS]", "separator": "[SEP]", "mask": "[MASK]"}


def tokenize(task: TokenizeTask) -> Report:
    """A part of 64 MiB at most: one of 64 MiB of text has half as many bytes."""
    tokens = int(sum(segment.weight for segment in task.segments) / BYTES_A_TOKEN)
    (Path(task.folder) / part_name(task.number, 0)).touch()
    return Report(
        counts={
            "documents_read": tokens // DOCUMENT_TOKENS,
            "bytes": int(tokens * BYTES_A_TOKEN),
            "tokens": tokens,
            "sentences": tokens // 20,
            "documents_empty": 0,
            "documents_in_pieces": 0,
            "documents_with_encoding_errors": 0,
        },
        documents=np.full(PARTITIONS, tokens // DOCUMENT_TOKENS // PARTITIONS),
        tokens=np.full(PARTITIONS, tokens // PARTITIONS),
        parts=1,
        digests="00" * 32 * len(task.segments),
    )


def exchange(task: ExchangeTask) -> tuple[int, int]:
    (Path(task.folder) / task.name).touch()
    return 1, DOCUMENT_TOKENS


def build(task: BuildTask) -> ShardReport:
    tokens = 1 << 21
    counts = dict.fromkeys(
        (
            "documents",
            "documents_duplicate",
            "documents_short",
            "tokens_duplicate",
            "tokens_short",
            "tokens_kept",
            "documents_with_copies",
            "tokens_in",
            "tokens_borrowed",
            "tokens_left_out",
            "tokens_out",
            "samples",
            "tokens",
            "pairs",
            "pairs_random",
            "masked",
            "masked_by_mask",
            "masked_kept",
            "masked_by_random",
        ),
        tokens,
    )
    name = f"{task.split}/shard-{task.number:05d}.arrow"
    shard = ShardInfo(name, 0, tokens // 120, int(tokens * SHARD_TOKENS), 4 * tokens, f"{task.number:064x}")
    return ShardReport(
        [shard],
        counts,
        [tokens // 15000 + n for n in range(task.max_length + 1)],
        np.arange(VOCABULARY, dtype=np.uint32),
    )


def corpus(tokens: int) -> tuple[list[InputFile], list[list[Segment]]]:
    """Files and tasks as `readers.plan` would have them, in files that aren't there."""
    files, tasks = [], []
    for number in range(-(-int(tokens * BYTES_A_TOKEN) // FILE_BYTES)):
        name = f"web-{number // 1000:03d}/part-{number:06d}.jsonl"
        file = InputFile(number, 0, f"/corpora/{name}", name, "jsonl", None, FILE_BYTES, number, SourceConfig())
        files.append(file)
        tasks += [
            [Segment(file, start, min(start + SEGMENT_BYTES, FILE_BYTES), min(SEGMENT_BYTES, FILE_BYTES - start))]
            for start in range(0, FILE_BYTES, SEGMENT_BYTES)
        ]
    return files, tasks


def peak_bytes(process: int | str = "self") -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text()).group(1)) << 10


class Told(Progress):
    """Each stage as it begins, with what this process has taken by then; counts rounds."""

    rounds = 0

    def stage(self, name: str, total: int, unit: str) -> None:
        self.rounds += name.startswith("exchange")
        print(f"{time.strftime('%H:%M:%S')} {name:12} {peak_bytes() / 1e9:5.2f} GB so far", flush=True)


@contextmanager
def cluster(folder: Path):
    """A scheduler and a worker with two threads; (address, process of the scheduler)."""
    root = str(Path(__file__).resolve().parent)
    environment = {**os.environ, "PYTHONPATH": f"{root}:{Path(root).parent}"}
    common = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": environment}
    command = [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--no-dashboard",
        "--scheduler-file",
        str(folder / "scheduler.json"),
    ]
    scheduler = subprocess.Popen(command, **common)
    worker = None
    try:
        while not (folder / "scheduler.json").is_file():
            time.sleep(0.1)
        time.sleep(1)
        address = json.loads((folder / "scheduler.json").read_text())["address"]
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "distributed.cli.dask_worker",
                address,
                "--nthreads",
                "2",
                "--no-dashboard",
                "--no-nanny",
                "--host",
                "127.0.0.1",
            ],
            **common,
        )
        from distributed import Client  # a dependency of this contender alone

        with Client(address) as client:
            client.wait_for_workers(1, timeout=120)
        yield address, scheduler
    finally:
        for process in filter(None, (worker, scheduler)):
            process.kill()
            process.wait()


def run(tokens: int, target_tokens: int, folder: Path, address: str | None) -> dict:
    from planning import build, exchange, tokenize  # by the name under which workers find them

    preparing.tokenize, preparing.exchange, preparing.build = tokenize, exchange, build
    preparing.estimate = lambda *_: None
    identity.fault_of_shards = lambda *_: None  # its shards are counts alone
    preparing.plan_splits = lambda *_: ({"validation": (0, 1 << 56), "test": (0, 0), "train": (1 << 56, 1 << 64)}, [])
    backend = wordpiece_backend({name: n for n, name in enumerate([*NAMES.values(), "a"])}, NAMES, True, None)
    tokenizer = Tokenizer(backend, NAMES)
    tokenizer.vocab_size = VOCABULARY
    config = PrepareConfig(
        input=["/corpora"],
        output=str(folder / "data"),
        tokenizer="-",
        shards=ShardsConfig(target_tokens),
        **({"executor": "dask", "scheduler": address} if address else {}),
    )
    work = folder / "data" / preparing.WORK_FOLDER
    work.mkdir(parents=True)
    files, tasks = corpus(tokens)
    began, at_first, told = time.monotonic(), peak_bytes(), Told()
    preparing._run(config, tokenizer, files, tasks, work, told, lambda: None)
    shards = len(json.loads((folder / "data/manifest.json").read_text())["splits"]["train"]["shards"]["file"])
    return {
        "tokens": tokens,
        "files": len(files),
        "tasks": len(tasks),
        "shards": shards,
        "rounds": told.rounds,
        "seconds": time.monotonic() - began,
        "parent_bytes_at_first": at_first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=2e12, help="of the corpus (2e12)")
    parser.add_argument("--target_tokens", type=int, default=1 << 21, help="of a shard (that of `cloze prepare`)")
    parser.add_argument("--executor", choices=["local", "dask"], default="local")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    print(own_command())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.executor == "dask":
            with cluster(folder) as (address, scheduler):
                figures = run(int(options.tokens), options.target_tokens, folder, address)
                figures["scheduler_bytes"] = peak_bytes(scheduler.pid)
        else:
            figures = run(int(options.tokens), options.target_tokens, folder, None)
        figures["parent_bytes"] = peak_bytes()
    for key, value in figures.items():
        print(f"{key:22} {value / 1e9:.2f} GB" if key.endswith("bytes") else f"{key:22} {value:,.0f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
