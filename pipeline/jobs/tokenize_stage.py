"""Stage 1 of preparation: tokenizes documents and distributes them by the hash of their text.

A task reads some segments of the input and writes parts of some 64 MB with documents in the order of their hash, from
which any range of hashes can be read (parts.py). A report, written last, marks the task as complete.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.formats import FORMATS
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.duplicates import content_hashes
from cloze.pipeline.jobs.reports import counts_by_name, list_of_counts, load_report, save_report
from cloze.pipeline.jobs.source_hashes import hash_piece, read_small
from cloze.pipeline.readers import read_segment
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.records import Document
from cloze.pipeline.stores.places import Place, to_place
from cloze.pipeline.tokenization.sentences import SPLITTERS
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from cloze.pipeline.untrusted import are_counts

PARTITIONS = 256  # partitions by the first byte of the hash, used to plan shards
_CHUNK_BYTES = 2 << 20  # bytes of text tokenized at once, so that the arrays stay in the cache
_DOCUMENT_BYTES = 256  # bytes of memory per document besides its text, which bounds chunks of tiny documents
PART_BYTES = 64 << 20  # size of a part, which bounds memory
_COUNTS = (
    *("documents_read", "documents_in_pieces", "documents_with_encoding_errors", "documents_empty"),
    *("bytes", "sentences", "tokens"),
)
_MOST_PARTS = 1 << 20  # of a task: 64 TB of tokens in one compressed file
# Bits set in the hash of a piece of a long document, so that all its pieces are in the train split: held-out splits
# have the lowest hashes. Only a corpus with too few other documents (splits.plan_splits) holds some of them out.
_LAST_BIT = 1 << 63


@dataclass
class Report:
    """Result of a task: counts; documents and tokens by partition (tokens multiplied by the weights); the number of its
    parts; and the hexadecimal SHA-256 of the file piece of each segment, concatenated.
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    documents: np.ndarray = field(default_factory=lambda: np.zeros(PARTITIONS, np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(PARTITIONS, np.int64))
    parts: int = 0
    digests: str = ""

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def save(self, path: Place) -> None:
        arrays = {"documents": self.documents.tolist(), "tokens": self.tokens.tolist()}
        save_report(path, vars(self) | arrays)

    @classmethod
    def load(cls, path: Place, num_segments: int) -> "Report | None":
        """The report of a complete task with this many segments; None if there is none or it is damaged."""
        digests = re.compile(f"[0-9a-f]{{{64 * num_segments}}}")
        kinds = {
            "counts": counts_by_name(*_COUNTS),
            "documents": list_of_counts(PARTITIONS),
            "tokens": list_of_counts(PARTITIONS),
            "parts": lambda value: are_counts([value], _MOST_PARTS),
            "digests": lambda value: isinstance(value, str) and digests.fullmatch(value) is not None,
        }
        if (content := load_report(path, kinds)) is None:
            return None
        content |= {name: np.array(content[name], np.int64) for name in ("documents", "tokens")}
        return cls(**content)


@dataclass(frozen=True)
class TokenizeTask:
    """Everything that a worker needs; small, since it is sent to other machines.

    Args:
        pieces: for each segment the bytes [start, stop) of its file that this task hashes, usually those that it reads.
    """

    number: int
    segments: list[Segment]
    pieces: list[tuple[int, int]]
    splitter: str
    tokenizer: str
    fingerprint: str
    folder: str
    weights: list[float]

    @property
    def report_path(self) -> Place:
        return to_place(self.folder) / report_name(self.number)


def report_name(task: int) -> str:
    return f"task-{task:06d}.json"


def part_name(task: int, part: int) -> str:
    return f"task-{task:06d}-{part:04d}.part"


def splitter_of(file: InputFile, config: PrepareConfig) -> str:
    """The sentence splitter for a file's documents: that of its format, or the configured one."""
    return FORMATS[file.format].splitter or config.sentences.splitter


@lru_cache(maxsize=1)  # one tokenizer per worker, with its table of words
def load_tokenizer(path: str, fingerprint: str) -> Tokenizer:
    """The tokenizer of a run. The cache key includes the fingerprint, since a cluster's worker may serve several
    runs.
    """
    tokenizer = Tokenizer.from_folder(path)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{path}: isn't the tokenizer of this run any more; remove the output folder and prepare again")
    return tokenizer


def tokenize(task: TokenizeTask) -> Report:
    """Run one task, unless it is complete."""
    if (complete := Report.load(task.report_path, len(task.segments))) is not None:
        return complete
    tokenizer = load_tokenizer(task.tokenizer, task.fingerprint)
    report = Report()
    held: list[parts.Table] = []
    size = 0
    for chunk in _chunks(task, report):
        held.append(encode(chunk, tokenizer, task.splitter, report))
        size += sum(column.nbytes for column in held[-1].values())
        if size >= PART_BYTES:
            _write_part(task, report, parts.joined(held))
            held, size = [], 0
    if held:
        _write_part(task, report, parts.joined(held))
    report.save(task.report_path)
    return report


def _chunks(task: TokenizeTask, report: Report) -> Iterator[list[tuple[int, Document]]]:
    """Chunks of documents with the index of their source, some two million bytes each."""
    chunk, size, digests = [], 0, []
    for segment, piece in zip(task.segments, task.pieces, strict=True):
        source = segment.file.source
        content, digest = read_small(segment.file, *piece) or (None, None)
        damaged = False  # the document was counted with an earlier piece
        for document in read_segment(segment, content):
            damaged &= document.piece > 1
            report.add(
                documents_read=document.piece <= 1,
                documents_in_pieces=document.piece == 1,
                documents_with_encoding_errors=document.damaged and not damaged,
                bytes=len(document.text),
            )
            damaged |= document.damaged
            chunk.append((source, document))
            size += len(document.text) + _DOCUMENT_BYTES
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        digests.append(digest or hash_piece(segment.file, *piece))  # read a moment ago, and in the page cache
    report.digests = "".join(digests)
    if chunk:
        yield chunk


def _id_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8], "big")


def encode(chunk: list[tuple[int, Document]], tokenizer: Tokenizer, splitter: str, report: Report) -> parts.Table:
    """A table of a chunk's documents; those without tokens are skipped and counted."""
    documents = [document for _, document in chunk]
    data = b"".join(part for document in documents for part in (document.text, b"\n"))
    starts = ragged.to_offsets(np.array([len(document.text) + 1 for document in documents], np.int64))
    cuts = ragged.union(SPLITTERS[splitter](data), starts)
    tokens, offsets = tokenizer.encode_bytes(data, cuts)
    lengths = np.diff(offsets)
    owner = np.searchsorted(starts, cuts[:-1], side="right") - 1
    if splitter != "pairs":  # a given pair has two segments, even if one of them is empty
        owner, lengths = owner[lengths > 0], lengths[lengths > 0]
    sentences = np.bincount(owner, minlength=len(documents))
    sizes = np.bincount(owner, weights=lengths, minlength=len(documents)).astype(np.int64)
    kept = np.flatnonzero(sizes)
    report.add(documents_empty=len(documents) - len(kept), sentences=len(lengths), tokens=len(tokens))
    hashes = content_hashes(data, starts, [document.piece for document in documents], pairs=splitter == "pairs")
    hashes = [(hashes[number][0] | (_LAST_BIT if documents[number].piece else 0), hashes[number][1]) for number in kept]
    ids = [
        high if (name := documents[number].id) is None else _id_hash(name)
        for number, (high, _) in zip(kept, hashes, strict=True)
    ]
    if len(kept) < len(documents):
        report.add(sentences=-int(sentences.sum() - sentences[kept].sum()))
        lengths = lengths[np.isin(owner, kept)]
    return {
        "hash": np.array([high for high, _ in hashes], np.uint64),
        "hash_rest": np.array([low for _, low in hashes], np.uint64),
        "document": np.array(ids, np.uint64),
        "order": np.array([documents[number].order for number in kept], np.uint64),
        "source": np.array([chunk[number][0] for number in kept], np.uint16),
        "num_sentences": sentences[kept].astype(np.uint32),
        "sentences": lengths.astype(np.uint32),
        "num_tokens": sizes[kept].astype(np.uint32),
        "tokens": tokens,
        "duplicates": np.zeros(len(kept), np.uint32),
        "duplicate_tokens": np.zeros(len(kept), np.uint64),
    }


def _write_part(task: TokenizeTask, report: Report, table: parts.Table) -> None:
    """Write a part, and count its documents, duplicates included, so that plans don't depend on which documents share a
    part.
    """
    partition = (table["hash"] >> np.uint64(56)).astype(np.int64)
    weight = np.array(task.weights)[table["source"].astype(np.int64)]
    report.documents += np.bincount(partition, minlength=PARTITIONS)
    report.tokens += np.bincount(partition, weights=table["num_tokens"] * weight, minlength=PARTITIONS).astype(np.int64)
    parts.write(to_place(task.folder) / part_name(task.number, report.parts), table)
    report.parts += 1
