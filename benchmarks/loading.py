"""What does loading cost: on one process, and on a rank of many?

    python benchmarks/loading.py --quick
    python benchmarks/loading.py --world-size 1024 --quick --json figures.json
    python benchmarks/loading.py --world-size 1024            # all strategies, 128 and 512 tokens, 10^5 shards: minutes
    python benchmarks/loading.py --data runs/shards --json figures.json

Without --world-size, in tokens a CPU second (of one process, with all its threads): ours (reader, gather, collate to
tensors), `datasets` (the same shards, shuffled, with a collator that concatenates), and mosaicml's `streaming` if it is
installed; and the time to a first batch, with the files in the page cache and, where the system allows to drop them,
cold; also with samples of 512 tokens, and with thousands of shards.

With --world-size N: ranks of N, simulated one after another, against one process that reads everything: CPU seconds
and bytes read for each of a rank's own tokens, with a global batch of 8,192 samples, masks stored and drawn at load
time. Bytes are those asked of the file system; `cold_ratio` is what a cold disk gives over that.

And a mixture: ranks of N that mix four folders (the same files four times) by shares that change on the way, against
the same ranks on one of them, in turns: `mixture_cpu_ratio` and `mixture_bytes_ratio`.
"""

import argparse
import atexit
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from synthetic_batches import own_command

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cloze.pipeline.allocator import keep_freed_pages
from cloze.pipeline.config import MaskingConfig, SamplesConfig
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.loading.mixture import Phase
from cloze.pipeline.loading.order import choose_streams
from cloze.pipeline.loading.streams import Mixture
from cloze.pipeline.ragged import to_offsets
from cloze.pipeline.records import ROLES, Masks, Samples, SpecialTokens
from cloze.pipeline.shards.manifest import Manifest, ShardTable, SplitInfo
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.shards.shard_file import write_shard
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer

BATCH = 256
GLOBAL_BATCH = 8192
VOCAB = 30522
NAMES = dict(zip(ROLES, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), strict=True))
SPECIAL = SpecialTokens(0, 1, 2, 3, 4)
# Of a stream and an epoch: those on the ends of its segment are read by its neighbours too: (b + 1) / b of the data.
BLOCKS_A_STREAM = 8
MIXED = (Phase(0, (0.4, 0.3, 0.2, 0.1)), Phase(12_000_000, (0.1, 0.2, 0.3, 0.4)))


def make_shards(
    folder: Path,
    shards: int,
    samples: int,
    max_length: int = 128,
    copies: int = 1,
    strategy: str = "",
    mask_sets: int = 2,
) -> Path:
    """Shards of random ids with the lengths and masks of prepared text: what they say doesn't matter to reading.

    copies: names of each file, for a data set that is large and takes little disk. strategy: that of masks drawn at
    load time; none: `mask_sets` are stored.
    """
    rng = np.random.default_rng(0)
    found, sets = [], 0 if strategy else mask_sets
    histogram, masked = np.zeros(max_length + 1, np.int64), 0
    for number in range(shards):
        lengths = np.where(rng.random(samples) < 0.85, max_length, rng.integers(8, max_length, samples))
        offsets = to_offsets(lengths)
        histogram += copies * np.bincount(lengths, minlength=max_length + 1)
        # ids as skewed as words are
        ids = (len(ROLES) + (VOCAB - len(ROLES)) * rng.random(offsets[-1]) ** 4).astype(np.uint16)
        ids[offsets[:-1]], ids[offsets[1:] - 1] = SPECIAL.classification, SPECIAL.separator
        counts = np.rint(0.15 * lengths).astype(np.int64)
        positions = np.concatenate(
            [np.sort(rng.choice(n, c, replace=False)) for n, c in zip(lengths, counts, strict=True)]
        )
        masked += copies * len(positions)
        masks = Masks(positions.astype(np.uint16), np.full(len(positions), 4, np.uint16), to_offsets(counts))
        made = Samples(
            ids,
            offsets,
            (lengths // 2).astype(np.uint16),
            np.zeros(samples, np.int8),
            np.zeros(samples, np.uint64),
            np.zeros(samples, np.uint16),
        )
        first = write_shard(folder / "train" / f"shard-{number:05d}.arrow", made, [masks] * sets, VOCAB, 0, "zstd")
        found.append(first)
        for copy in range(1, copies):
            found.append(replace(first, file=f"train/shard-{number:05d}-{copy}.arrow"))
            os.link(folder / first.file, folder / found[-1].file)
    if strategy:  # two fifths of the ids go on with a word
        tokens = [*NAMES.values(), *(f"w{n}" if n % 5 < 3 else f"##w{n}" for n in range(VOCAB - len(ROLES)))]
        backend = wordpiece_backend({token: n for n, token in enumerate(tokens)}, NAMES, True, None)
        tokenizer = Tokenizer(backend, NAMES)
        tokenizer.save(folder / "tokenizer")
    counts = {"samples": int(histogram.sum()), "tokens": int(histogram @ np.arange(max_length + 1)), "masked": masked}
    Manifest(
        tokenizer_fingerprint=tokenizer.fingerprint if strategy else "",
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        objective="next_sentence",
        max_length=max_length,
        mask_sets=sets,
        pair_sets=1,
        seed=0,
        preparation={
            "samples": asdict(SamplesConfig()),
            "masking": asdict(MaskingConfig(strategy=strategy or "token")),
        },
        sources=[],
        counts={},
        unigram_entropy=0.0,
        splits={
            "train": SplitInfo(counts, histogram.tolist(), ShardTable.of(found)),
            **{name: SplitInfo({}, [0], ShardTable.of([])) for name in ("validation", "test")},
        },
    ).save(folder)
    return folder


def open_stream(data: Path | list[Path], size: int, rank: int = 0, world_size: int = 1) -> BatchStream:
    """Batches of one folder, or of several in MIXED shares."""
    folders = data if isinstance(data, list) else [data]
    readers = [ShardReader(folder, check_sizes=rank == 0) for folder in folders]
    return BatchStream(
        Mixture(readers, MIXED) if isinstance(data, list) else readers[0],
        global_batch_size=size,
        micro_batch_size=min(32, size // world_size),
        rank=rank,
        world_size=world_size,
        streams=choose_streams([size], world_size, len(readers)),
        seed=1,
    )


def rank_cost(data: Path | list[Path], world_size: int, rank: int, tokens: int) -> tuple[float, float]:
    """CPU seconds and bytes read, each for one of the rank's own tokens, over some `tokens` of them."""
    stream = open_stream(data, GLOBAL_BATCH, rank, world_size)
    next(stream)
    gc.freeze()  # a full collection of all that torch has made takes 0.1 s, and would fall on one side of a comparison
    began, before, done = time.process_time(), bytes_read(), 0
    while done < tokens:  # as much is prefetched at the end as was at the beginning
        done += next(stream).num_tokens
    seconds, count = time.process_time() - began, bytes_read() - before
    stream.close()
    return seconds / done, count / done


def bytes_read(counter: str = "rchar") -> int:
    """By this process: with system calls (rchar; the reader maps no file), or from a disk (read_bytes)."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(counters[counter])


def peak_kib() -> int:
    """The most memory that this process has had so far."""
    return int(Path("/proc/self/status").read_text(encoding="ascii").split("VmHWM:")[1].split()[0])


def cold_ratio(data: Path) -> float:
    """Bytes that a disk gives over those that the reader asks for, files out of the page cache."""
    drop(data)
    reader = ShardReader(data, check_sizes=False)
    before, asked = bytes_read("read_bytes"), bytes_read()
    reader.window(np.arange(0, 19, 2), 1)  # of one shard: names of the same file would be in the cache
    return (bytes_read("read_bytes") - before) / (bytes_read() - asked)


def columns_in_use(data: Path) -> float:
    """Bytes a token of the columns that training with stored masks reads."""
    reader = ShardReader(data, check_sizes=False)
    before = bytes_read()
    window = reader.window(np.arange(8), 1 if reader.manifest.mask_sets else None)
    return (bytes_read() - before) / len(window.samples.input_ids)


def compare_ranks(folder: Path, world_size: int, quick: bool) -> dict[str, float]:
    """Print and return what a rank's own token costs, against one process that reads everything."""
    figures: dict[str, float] = {}
    kinds = ["", "token"] if quick else ["", "token", "span", "whole_word"]
    print(f"a token of a rank of {world_size:,}, and of one process\n")
    for length in (128,) if quick else (128, 512):
        for strategy in kinds:
            blocks = BLOCKS_A_STREAM * choose_streams([GLOBAL_BATCH], world_size)
            samples = 20 * (1 << 17) // length  # some 20 blocks
            copies = -(-blocks // (8 * 19))
            data = make_shards(folder / f"{length}{strategy}", 8, samples, length, copies, strategy)
            mean = ShardReader(data, check_sizes=False).mean_length
            # One process: twice what its windows hold, so that all of them are read and read again.
            alone = rank_cost(data, 1, 0, int(2 * (1 << 27)))
            ranks = [
                rank_cost(data, world_size, rank, int(24 * (1 << 17)))
                for rank in np.linspace(0, world_size - 1, 4).astype(int).tolist()
            ]
            cpu, read = np.mean(ranks, axis=0)
            name = f"{length}_{strategy or 'stored'}"
            figures |= {
                f"cpu_ratio_{name}": cpu / alone[0],
                f"bytes_ratio_{name}": read / alone[1],
                f"tokens_per_cpu_second_{name}": 1 / alone[0],
                f"bytes_over_columns_{name}": read / columns_in_use(data),
            }
            print(
                f"{length:4} tokens ({mean:.0f}), masks {strategy or 'stored':10}: {1e9 * cpu:6.1f} and "
                f"{1e9 * alone[0]:6.1f} ns of CPU ({cpu / alone[0]:.2f}), {read:.2f} and {alone[1]:.2f} bytes "
                f"({read / alone[1]:.2f}); columns in use {columns_in_use(data):.2f}"
            )
            if not strategy and length == 128:
                figures |= compare_mixture(data, world_size)
                if hasattr(os, "posix_fadvise"):
                    figures["cold_ratio"] = cold_ratio(data)
    figures["cpu_ratio"] = max(value for name, value in figures.items() if name.startswith("cpu_ratio"))
    figures["bytes_ratio"] = max(value for name, value in figures.items() if name.startswith("bytes_ratio"))
    print(
        f"\ncpu_ratio {figures['cpu_ratio']:.2f}, bytes_ratio {figures['bytes_ratio']:.2f}, bytes a cold disk gives "
        f"over those asked for {figures.get('cold_ratio', float('nan')):.3f}"
    )
    if not quick:
        figures |= first_batches(folder, world_size)
    return figures


def compare_mixture(data: Path, world_size: int) -> dict[str, float]:
    """Print and return what a rank's own token costs of a mixture, against a folder alone, measured in turns."""
    ranks = np.linspace(0, world_size - 1, 4).astype(int).tolist()
    tokens = int(24 * (1 << 17))
    pairs = [
        [rank_cost(each, world_size, rank, tokens) for each in ([data] * len(MIXED[0].shares), data)] for rank in ranks
    ]
    (cpu, read), (alone, alone_read) = (np.mean(side, axis=0) for side in zip(*pairs, strict=True))
    figures = {"mixture_cpu_ratio": cpu / alone, "mixture_bytes_ratio": read / alone_read}
    print(
        f"mixture of {len(MIXED[0].shares)} folders: {1e9 * cpu:6.1f} ns of CPU, of one {1e9 * alone:6.1f} "
        f"({figures['mixture_cpu_ratio']:.2f}); {read:.2f} and {alone_read:.2f} bytes "
        f"({figures['mixture_bytes_ratio']:.2f})"
    )
    return figures


def first_batches(folder: Path, world_size: int) -> dict[str, float]:
    """Seconds and peak memory, with all that is imported, to a first batch of 10^9 samples in 10^5 shards, each in a
    fresh process."""
    data = make_shards(folder / "many", 4, 10_000, copies=25_000, mask_sets=1)
    figures = {}
    for name, size, rank in (("rank", world_size, world_size // 2), ("alone", 1, 0)):
        code = (
            "import sys, time; sys.path.insert(0, sys.argv[1]); import loading\n"
            "data, numbers = loading.Path(sys.argv[2]), map(int, sys.argv[3:])\n"
            "began, cpu = time.perf_counter(), time.process_time()\n"
            "stream = loading.open_stream(data, loading.GLOBAL_BATCH, *numbers)\n"
            "next(stream)\n"
            "print(time.perf_counter() - began, time.process_time() - cpu, loading.peak_kib())\n"
            "stream.close()  # a thread that reads while the interpreter ends may end it with SIGABRT\n"
        )
        command = [sys.executable, "-c", code, str(Path(__file__).parent), str(data), str(rank), str(size)]
        found = [subprocess.run(command, capture_output=True, check=True, text=True).stdout.split() for _ in range(3)]
        seconds, cpu, kib = (min(map(float, column)) for column in zip(*found, strict=True))
        figures |= {
            f"first_batch_{name}_seconds": seconds,
            f"first_batch_{name}_cpu_seconds": cpu,
            f"first_batch_{name}_gib": kib / 2**20,
        }
        print(
            f"first batch of 10^9 samples in 10^5 shards, {name} of {size:,}: {seconds:.2f} s, {cpu:.2f} s of CPU, "
            f"{kib / 2**20:.2f} GiB"
        )
    return figures


def timed(iterator, seconds: float) -> float:
    """Tokens a CPU second of an iterator of token counts."""
    next(iterator)
    began, tokens = time.process_time(), 0
    while (elapsed := time.process_time() - began) < seconds:
        tokens += next(iterator)
    return tokens / elapsed


def ours(data: Path):
    stream = open_stream(data, BATCH)
    try:
        for batch in stream:
            yield batch.num_tokens
    finally:
        stream.close()


def hugging_face(data: Path):
    import datasets

    files = sorted(map(str, (data / "train").glob("*.arrow")))
    with tempfile.TemporaryDirectory() as cache:
        datasets.disable_progress_bars()
        columns = ["input_ids", "segment_b_start", "next_sentence_label", "masked_positions_0", "masked_ids_0"]
        table = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=cache).select_columns(columns)
        table = table.shuffle(seed=1).with_format("numpy")
        while True:
            for batch in table.iter(BATCH):
                ids = np.concatenate(list(batch["input_ids"])).astype(np.int64)
                lengths = np.array([len(row) for row in batch["input_ids"]])
                offsets = to_offsets(lengths)
                counts = np.array([len(row) for row in batch["masked_positions_0"]])
                masked = np.concatenate(list(batch["masked_positions_0"])) + np.repeat(offsets[:-1], counts)
                labels = torch.from_numpy(ids[masked])
                ids[masked] = np.concatenate(list(batch["masked_ids_0"]))
                assert len(labels) and torch.from_numpy(ids) is not None
                yield len(ids)


def streaming(data: Path):
    import streaming as mosaic

    reader = ShardReader(data)
    samples, _ = reader.take(np.arange(min(50_000, reader.num_samples)), 0)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)  # not sooner: threads of the library go on reading
    with mosaic.MDSWriter(out=folder, columns={"ids": "bytes"}) as writer:
        for low, high in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
            writer.write({"ids": samples.input_ids[low:high].tobytes()})
    table = mosaic.StreamingDataset(local=folder, shuffle=True, batch_size=BATCH)
    while True:
        rows = []
        for row in table:
            rows.append(np.frombuffer(row["ids"], np.uint16).astype(np.int64))
            if len(rows) == BATCH:
                ids = torch.from_numpy(np.concatenate(rows))
                rows = []
                yield len(ids)


def drop(data: Path) -> None:
    """Take the shards out of the page cache."""
    for path in (data / "train").iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_batch(data: Path, cold: bool) -> float:
    """Seconds from opening the folder to the first batch."""
    if cold:
        drop(data)
    began = time.perf_counter()
    stream = open_stream(data, BATCH)
    next(stream)
    seconds = time.perf_counter() - began
    stream.close()
    return seconds


def compare_peers(folder: Path, data: Path | None, quick: bool) -> dict[str, float]:
    """Print and return the time to a first batch, and the rates of one process."""
    figures: dict[str, float] = {}
    measured = {"first_batch": data or make_shards(folder / "128", *((4, 20_000) if quick else (8, 40_000)))}
    if not data:
        measured["first_batch_512"] = make_shards(folder / "512", 8, 5_000, max_length=512)
        measured["first_batch_many"] = make_shards(folder / "many", 2, 20_000, copies=2_000)
    for label, made in measured.items():
        reader = ShardReader(made)
        warm = min(first_batch(made, cold=False) for _ in range(3))
        line = f"first batch of {reader.num_samples:,} samples of up to {reader.manifest.max_length} tokens"
        figures[f"{label}_seconds"] = warm
        line += f": {warm:.3f} s with the files in the page cache"
        if hasattr(os, "posix_fadvise"):
            figures[f"{label}_cold_seconds"] = cold = first_batch(made, cold=True)
            line += f", {cold:.3f} s cold"
        print(line)
    for label, function in (("ours", ours), ("datasets", hugging_face), ("streaming", streaming)):
        try:
            rate = timed(function(measured["first_batch"]), 2.0 if quick else 5.0)
        except ImportError as error:
            print(f"{label:10} not installed ({error.name})")
            continue
        figures[f"{label}_tokens_per_second"] = round(rate)
        print(f"{label:10} {rate / 1e6:7.2f} M tokens a CPU second")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 seconds, on shards that it makes")
    parser.add_argument("--data", help="a folder that `cloze prepare` wrote")
    parser.add_argument("--world-size", type=int, help="compare ranks of so many with one process")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(own_command("datasets", "mosaicml-streaming", "torch"))
    print(f"{platform.machine()}, {os.cpu_count()} cores\n")
    keep_freed_pages()  # as a training process does
    with tempfile.TemporaryDirectory() as name:
        if options.world_size:
            figures = compare_ranks(Path(name), options.world_size, options.quick)
        else:
            figures = compare_peers(Path(name), options.data and Path(options.data), options.quick)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
