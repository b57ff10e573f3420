"""Stage 1 of preparing: documents to ids, scattered by the hash of their text.

A task reads some segments of the input and writes files of some 64 MB, documents in the order of their
hash, so that stage 2 can take any range of hashes from each. A report, written last, says that a task is complete.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from cloze.pipeline import ragged
from cloze.pipeline.config import PrepareConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.readers import read
from cloze.pipeline.readers.files import InputFile, Segment
from cloze.pipeline.records import Document, token_type
from cloze.pipeline.storage import publish_text, publishing
from cloze.pipeline.tokenization.sentences import SPLITTERS
from cloze.pipeline.tokenization.tokenizer import Tokenizer

PARTITIONS = 256  # by the first byte of the hash: what stage 2 plans shards with
_CHUNK_BYTES = 2 << 20  # of text tokenized at once: the arrays over its bytes stay in the cache
_DOCUMENT_BYTES = 256  # that a document takes in memory beside its text: a chunk of the tiniest ones is bounded too
_PART_BYTES = 64 << 20  # of a file: bounds memory
# Of the hash of a piece of a long document: so it lies in the train split, like all of its pieces. No held-out share
# reaches that far; only a corpus with too few other documents (planning.plan_splits) holds some of them out.
_LAST_BIT = 1 << 63
_WHITE_SPACE = bytes.maketrans(b"\t\r\n\v\f", b"     ")
_WHITE_SPACE_IN_PAIRS = bytes.maketrans(b"\r\n\v\f", b"    ")  # the tab divides the segments
_SPACE = 0x20


@dataclass
class Report:
    """What a task found: counts, and by partition documents and tokens, the latter as often as weights repeat them."""

    counts: dict[str, int] = field(default_factory=dict)
    documents: np.ndarray = field(default_factory=lambda: np.zeros(PARTITIONS, np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(PARTITIONS, np.int64))
    parts: list[str] = field(default_factory=list)

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def save(self, path: Path) -> None:
        content = {
            "counts": self.counts,
            "documents": self.documents.tolist(),
            "tokens": self.tokens.tolist(),
            "parts": self.parts,
        }
        publish_text(path, json.dumps(content), durable=False)

    @classmethod
    def load(cls, path: Path) -> "Report | None":
        """The report of a complete task; None if there is none that can be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content |= {name: np.array(content[name], np.int64) for name in ("documents", "tokens")}
            return cls(**content)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class TokenizeTask:
    """Everything that a worker needs; small, so that it travels to another machine."""

    number: int
    segments: list[Segment]
    splitter: str
    tokenizer: str
    fingerprint: str
    folder: str
    weights: list[float]

    @property
    def report_path(self) -> Path:
        return Path(self.folder) / f"task-{self.number:06d}.json"


def part_schema(vocab_size: int) -> pa.Schema:
    """A row is a document; `sentences` are lengths in tokens."""
    return pa.schema(
        [
            ("hash", pa.uint64()),
            ("hash_rest", pa.uint64()),
            ("document", pa.uint64()),
            ("order", pa.uint64()),
            ("source", pa.uint16()),
            ("sentences", pa.large_list(pa.uint32())),
            ("tokens", pa.large_list(token_type(vocab_size))),
        ]
    )


def splitter_of(file: InputFile, config: PrepareConfig) -> str:
    """The rule that cuts a file's documents into sentences: its own, or the configured one."""
    return file.format if file.format in ("lines", "pairs") else config.sentences.splitter


@lru_cache(maxsize=1)  # one tokenizer a worker, with its table of words
def load_tokenizer(path: str, fingerprint: str) -> Tokenizer:
    """The tokenizer of a run. A worker of a cluster outlives runs, so the path alone doesn't name it."""
    tokenizer = Tokenizer.from_folder(path)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{path}: isn't the tokenizer of this run any more; remove the output folder and prepare again")
    return tokenizer


def tokenize(task: TokenizeTask) -> Report:
    """Run one task, or find that it is complete."""
    if (complete := Report.load(task.report_path)) is not None:
        return complete
    tokenizer = load_tokenizer(task.tokenizer, task.fingerprint)
    report = Report()
    held: list[dict[str, np.ndarray]] = []
    size = 0
    for chunk in _chunks(task, report):
        held.append(encode(chunk, tokenizer, task.splitter, report))
        size += sum(column.nbytes for column in held[-1].values())
        if size >= _PART_BYTES:
            _write_part(task, report, held, tokenizer.vocab_size)
            held, size = [], 0
    if held:
        _write_part(task, report, held, tokenizer.vocab_size)
    report.save(task.report_path)
    return report


def _chunks(task: TokenizeTask, report: Report) -> Iterator[list[tuple[int, Document]]]:
    """Documents with the number of their source, some two million bytes at a time."""
    chunk, size = [], 0
    for segment in task.segments:
        source = segment.file.source
        damaged = False  # the document, by a piece before
        for document in read([segment]):
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
    if chunk:
        yield chunk


def content_hashes(data: bytes, starts: np.ndarray, pairs: bool = False) -> list[tuple[int, int]]:
    """128-bit hashes of texts, each with its white space made alike: the first half and the rest.

    starts (N+1,): where they begin in `data`. pairs: each is two segments with a tab between them.
    """
    values = np.frombuffer(data.translate(_WHITE_SPACE_IN_PAIRS if pairs else _WHITE_SPACE), np.uint8)
    space = values == _SPACE
    again = np.flatnonzero(space[1:] & space[:-1]) + 1  # white space behind white space
    text = np.delete(values, again).tobytes()
    bounds = (starts - np.searchsorted(again, starts)).tolist()
    hashes = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        parts = text[low:high].split(b"\t")  # one, but for a pair
        digest = hashlib.sha256(b"\t".join(part.strip() for part in parts)).digest()
        hashes.append((int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")))
    return hashes


def _id_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8], "big")


def encode(
    chunk: list[tuple[int, Document]], tokenizer: Tokenizer, splitter: str, report: Report
) -> dict[str, np.ndarray]:
    """Flat arrays of a chunk's documents; those without a token are left out and counted."""
    documents = [document for _, document in chunk]
    data = b"".join(part for document in documents for part in (document.text, b"\n"))
    starts = ragged.to_offsets(np.array([len(document.text) + 1 for document in documents], np.int64))
    cuts = ragged.union(SPLITTERS[splitter](data), starts)
    tokens, offsets = tokenizer.encode_bytes(data, cuts)
    lengths = np.diff(offsets)
    owner = np.searchsorted(starts, cuts[:-1], side="right") - 1
    if splitter != "pairs":  # a given pair has two segments, even where one of them is empty
        owner, lengths = owner[lengths > 0], lengths[lengths > 0]
    sentences = np.bincount(owner, minlength=len(documents))
    sizes = np.bincount(owner, weights=lengths, minlength=len(documents)).astype(np.int64)
    kept = np.flatnonzero(sizes)
    report.add(documents_empty=len(documents) - len(kept), sentences=len(lengths), tokens=len(tokens))
    hashes = content_hashes(data, starts, pairs=splitter == "pairs")
    hashes = [
        (hashes[number][0] | (_LAST_BIT if documents[number].piece else 0), hashes[number][1]) for number in kept
    ]
    ids = [
        high if documents[number].id is None else _id_hash(documents[number].id)
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
        "num_sentences": sentences[kept],
        "sentences": lengths.astype(np.uint32),
        "num_tokens": sizes[kept],
        "tokens": tokens,
    }


def _write_part(task: TokenizeTask, report: Report, held: list[dict], vocab_size: int) -> None:
    columns = {name: np.concatenate([chunk[name] for chunk in held]) for name in held[0]}
    by_hash = np.lexsort((columns["order"], columns["hash_rest"], columns["hash"]))
    partition = (columns["hash"] >> np.uint64(56)).astype(np.int64)
    weight = np.array(task.weights)[columns["source"].astype(np.int64)]
    report.documents += np.bincount(partition, minlength=PARTITIONS)
    report.tokens += np.bincount(partition, weights=columns["num_tokens"] * weight, minlength=PARTITIONS).astype(
        np.int64
    )
    schema = part_schema(vocab_size)
    arrays = [ragged.to_arrow(columns[name][by_hash]) for name in ("hash", "hash_rest", "document", "order", "source")]
    for name in ("sentences", "tokens"):
        lengths = columns[f"num_{name}"]
        starts = ragged.to_offsets(lengths)[:-1]
        flat = ragged.gather(columns[name], starts[by_hash], lengths[by_hash])
        arrays.append(
            pa.LargeListArray.from_arrays(ragged.to_arrow(ragged.to_offsets(lengths[by_hash])), ragged.to_arrow(flat))
        )
    name = f"task-{task.number:06d}-{len(report.parts):04d}.arrow"
    with publishing(Path(task.folder) / name) as aside:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    report.parts.append(name)
