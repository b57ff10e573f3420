"""How fast are batches loaded, in the epoch's shuffled order?

    python benchmarks/loading.py --quick
    python benchmarks/loading.py --data runs/shards --json figures.json

One core: tokens a second of ours (reader, gather, collate to tensors), of `datasets` (the same shards, shuffled, with a
collator that concatenates), and of mosaicml's `streaming` if it is installed; and the time to a first batch, with the
files in the page cache and, where the system allows to drop them, cold; also with samples of 512 tokens, and with
thousands of shards.
"""

import argparse
import atexit
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from synthetic_batches import own_command

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cloze.pipeline.loading.batches import BatchStream, SampleStream
from cloze.pipeline.loading.collate import collate
from cloze.pipeline.ragged import to_offsets
from cloze.pipeline.records import Masks, Samples, SpecialTokens
from cloze.pipeline.shards.manifest import Manifest, SplitInfo
from cloze.pipeline.shards.shards import ShardReader, write_shard

BATCH = 256
VOCAB = 30522


def make_shards(folder: Path, shards: int, samples: int, max_length: int = 128, copies: int = 1) -> Path:
    """Shards of random ids with the lengths and masks of prepared text: what they say doesn't matter to reading.

    copies: names of each file, for a data set that is large and takes little disk.
    """
    rng = np.random.default_rng(0)
    found = []
    for number in range(shards):
        lengths = np.where(rng.random(samples) < 0.85, max_length, rng.integers(8, max_length, samples))
        offsets = to_offsets(lengths)
        # ids as skewed as words are
        ids = (VOCAB * rng.random(offsets[-1]) ** 4).astype(np.uint16)
        counts = np.rint(0.15 * lengths).astype(np.int64)
        positions = np.concatenate(
            [np.sort(rng.choice(n, c, replace=False)) for n, c in zip(lengths, counts, strict=True)]
        )
        masks = Masks(positions.astype(np.uint16), np.full(len(positions), 4, np.uint16), to_offsets(counts))
        made = Samples(ids, offsets, (lengths // 2).astype(np.uint16), np.zeros(samples, np.int8),
                       np.zeros(samples, np.uint64))
        first = write_shard(folder / "train" / f"shard-{number:05d}.arrow", made, [masks] * 2, VOCAB, 0, "zstd")
        found.append(first)
        for copy in range(1, copies):
            found.append(replace(first, file=f"train/shard-{number:05d}-{copy}.arrow"))
            os.link(folder / first.file, folder / found[-1].file)
    Manifest(
        tokenizer_fingerprint="", vocab_size=VOCAB, special_tokens=SpecialTokens(0, 1, 2, 3, 4),
        objective="next_sentence",
        max_length=max_length, mask_sets=2, pair_sets=1, seed=0, preparation={"masking": {}}, sources=[], counts={},
        unigram_entropy=0.0, splits={"train": SplitInfo({}, [], found)},
    ).save(folder)
    return folder


def timed(iterator, seconds: float) -> float:
    """Tokens a second of an iterator of token counts."""
    next(iterator)
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        tokens += next(iterator)
    return tokens / elapsed


def ours(data: Path):
    """On this thread, so that one core does everything; a stream of batches would use a second one to prefetch."""
    stream, position = SampleStream(ShardReader(data), seed=1), 0
    while True:
        (_, _, samples, masks), *more = stream.read(position, BATCH)
        position += BATCH
        yield len(collate(samples, masks)["input_ids"]) + sum(len(part[2].input_ids) for part in more)


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


def first_batch(data: Path, cold: bool) -> float:
    """Seconds from opening the folder to the first batch."""
    if cold:
        for path in (data / "train").iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    stream = BatchStream(
        ShardReader(data), global_batch_size=BATCH, micro_batch_size=BATCH, rank=0, world_size=1, seed=1
    )
    next(stream)
    seconds = time.perf_counter() - began
    stream.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 seconds, on shards that it makes")
    parser.add_argument("--data", help="a folder that `cloze prepare` wrote")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = 2.0 if options.quick else 5.0
    print(own_command("datasets", "mosaicml-streaming", "torch"))
    print(f"{platform.machine()}, {os.cpu_count()} cores\n")
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        size = (4, 20_000) if options.quick else (8, 40_000)
        data = Path(options.data) if options.data else make_shards(Path(name) / "128", *size)
        measured = {"first_batch": data}
        if not options.data:
            measured["first_batch_512"] = make_shards(Path(name) / "512", 8, 5_000, max_length=512)
            measured["first_batch_many"] = make_shards(Path(name) / "many", 2, 20_000, copies=2_000)
        for label, folder in measured.items():
            reader = ShardReader(folder)
            warm = min(first_batch(folder, cold=False) for _ in range(3))
            line = f"first batch of {reader.num_samples:,} samples of up to {reader.manifest.max_length} tokens"
            figures[f"{label}_seconds"] = warm
            line += f": {warm:.3f} s with the files in the page cache"
            if hasattr(os, "posix_fadvise"):
                figures[f"{label}_cold_seconds"] = cold = first_batch(folder, cold=True)
                line += f", {cold:.3f} s cold"
            print(line)
        for label, function in (("ours", ours), ("datasets", hugging_face), ("streaming", streaming)):
            try:
                rate = timed(function(data), seconds)
            except ImportError as error:
                print(f"{label:10} not installed ({error.name})")
                continue
            figures[f"{label}_tokens_per_second"] = round(rate)
            print(f"{label:10} {rate / 1e6:7.2f} M tokens/s")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
