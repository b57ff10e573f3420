"""Estimates of the time and disk space of a preparation, from a small sample."""

import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.exchange_stage import FILES_AT_ONCE
from cloze.pipeline.jobs.tokenize_stage import PART_BYTES, Report, encode, splitter_of
from cloze.pipeline.readers import compression, read
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.records import Document
from cloze.pipeline.samples.building import Documents, SampleBuilder
from cloze.pipeline.samples.masking import MaskingRules, draw_sets
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_READ_BYTES = 1 << 20  # bytes of text whose reading is timed: a block, the unit of reading
_SAMPLE_BYTES = 128 << 10  # bytes of text that are run through both stages: some twenty milliseconds of work
_RATIO_BYTES = 1 << 20  # bytes of decompressed text, to measure the compression ratio
# Measured on English prose with next-sentence pairs (docs/performance.md): tokens in samples for each of the text,
# bytes of a token in the shards and of its share of a mask set, and the time of stage 2 (which also collects documents
# and writes) as a share of that of building samples and drawing masks; of stage 1 as a share of reading and encoding.
_BORROWED = 1.33
_BYTES = {"zstd": (1.35, 0.28), "none": (2.1, 0.7)}
_STAGE_1, _STAGE_2 = 1.1, 1.5


@dataclass(frozen=True)
class Estimate:
    """tokens of the text; seconds in total; bytes of the shards, and peak bytes on disk while preparing."""

    tokens: int
    seconds: float
    shard_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        return (
            f"about {self.tokens / 1e6:,.2f} million tokens, {_duration(self.seconds)}, "
            f"{_size(self.disk_bytes)} on disk while preparing and {_size(self.shard_bytes)} after"
        )


_Result = TypeVar("_Result")


def estimate(
    config: PrepareConfig, tokenizer: Tokenizer, files: list[InputFile], tasks: list[list[Segment]]
) -> Estimate | None:
    """Estimate from the first documents of the input; None if there is none, or the size of a data set on the hub isn't
    known.
    """
    if not tasks or not all(file.size for file in files if file.format == "dataset"):
        return None
    # CPU time, not wall time: workers are starting, and other processes may use the machine
    began = time.process_time()
    documents = list(_first(itertools.chain.from_iterable(map(read, tasks)), _READ_BYTES))
    reading = (time.process_time() - began) / max(1, sum(len(document.text) for document in documents))
    splitter = splitter_of(tasks[0][0].file, config)
    head = (lambda text: text) if splitter == "pairs" else _head  # not half a pair
    sample = [(0, replace(each, text=head(each.text))) for each in _first(documents, _SAMPLE_BYTES)]
    size = sum(len(document.text) for _, document in sample)
    if not size:
        return None
    encoded, encoding = _timed(lambda: encode(sample, tokenizer, splitter, Report()))
    tokens = len(encoded["tokens"])
    _, building = _timed(lambda: _build(config, tokenizer, encoded))
    _, hashing = _timed(lambda: hashlib.sha256(bytes(_READ_BYTES)))
    weight = sum(file.size for file in files)
    sources = config.all_sources
    repeated = sum(file.size * sources[file.source].weight for file in files) / weight
    largest = max(files, key=lambda file: file.size)
    text_bytes = weight * (_expansion(largest) if largest.compression else 1)
    whole = tokens / size * text_bytes
    in_samples = whole * (_BORROWED if config.samples.objective == "next_sentence" else 1.05)
    base, masks = _BYTES[config.shards.compression]
    # a token in 65536 or more ids takes two bytes more, before compression
    base += 2 * (tokenizer.vocab_size > 1 << 16)
    copies = len(config.lengths) * config.samples.pair_sets * repeated
    shard_bytes = in_samples * (base + masks * config.stored_mask_sets) * copies
    stage_1 = whole * (2 if tokenizer.vocab_size <= 1 << 16 else 4) * 1.1
    seconds = text_bytes * (_STAGE_1 * (reading + encoding / size) + _STAGE_2 * building / size * copies)
    seconds += weight * hashing / _READ_BYTES
    exchanged = stage_1 > FILES_AT_ONCE * PART_BYTES  # the parts are on the disk twice for a while
    most = stage_1 + max(shard_bytes, stage_1 if exchanged else 0)
    return Estimate(int(whole), seconds / config.workers, int(shard_bytes), int(most))


def _first(documents: Iterable[Document], size: int) -> Iterator[Document]:
    """The first documents, up to `size` bytes."""
    for document in documents:
        yield document
        size -= len(document.text)
        if size <= 0:
            return


def _head(text: bytes) -> bytes:
    return text[:_SAMPLE_BYTES].decode(errors="ignore").encode()


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """Result of some work, and its seconds on a core with a filled table of words: the better of two times."""
    found, seconds = work(), []
    for _ in range(2):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return found, min(seconds)


def _build(config: PrepareConfig, tokenizer: Tokenizer, encoded: dict[str, np.ndarray]) -> None:
    """Samples and masks of one copy of some documents, if any has a token."""
    if not len(encoded["hash"]):
        return
    documents = Documents(
        tokens=encoded["tokens"],
        sentence_offsets=ragged.to_offsets(encoded["sentences"].astype(np.int64)),
        document_offsets=ragged.to_offsets(encoded["num_sentences"]),
        ids=encoded["document"],
        keys=encoded["hash"],
        sources=encoded["source"],
    )
    builder = SampleBuilder(asdict(config.samples), config.max_length, tokenizer.special_tokens)
    samples, _ = builder.build(documents, (config.seed,))
    rules = MaskingRules(
        asdict(config.masking),
        config.max_length,
        tokenizer.vocab_size,
        tokenizer.special_tokens,
        tokenizer.continues_word,
    )
    draw_sets(rules, samples, (config.seed,), config.stored_mask_sets)


def check_disk(estimate: Estimate, output: Path) -> None:
    """Raise UserError if the disk has too little space, counting what an interrupted run has written already."""
    existing = output
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) if output.is_dir() else 0
    if estimate.disk_bytes - written > free:
        raise UserError(
            f"output: {output} needs about {_size(estimate.disk_bytes)} while preparing, found {_size(free)} free; "
            "free space, choose another --output, or lower --mask_sets"
        )


def _expansion(file: InputFile) -> float:
    """Ratio of decompressed to compressed bytes, at the beginning of a compressed file."""
    assert file.compression is not None, file.path
    try:
        return compression.expansion(file.path, file.compression, _RATIO_BYTES)
    except compression.ERRORS as error:
        raise UserError(f"{file.path}: can't be read ({error}); restore the file") from error


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "under a second"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
