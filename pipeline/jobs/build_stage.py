"""Stage 2 of preparation: builds a shard from a range of document hashes: documents, samples, masks."""

import base64
import hashlib
import zlib
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import numpy as np

from cloze.pipeline import ragged
from cloze.pipeline.fields import Fields
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs.duplicates import distinct
from cloze.pipeline.jobs.identity import check_ours
from cloze.pipeline.jobs.reports import (
    counts_by_name,
    has_kinds,
    is_count,
    is_text,
    list_of_counts,
    load_report,
    save_report,
)
from cloze.pipeline.jobs.tokenize_stage import load_tokenizer
from cloze.pipeline.records import Masks, Samples
from cloze.pipeline.samples.building import Documents, SampleBuilder
from cloze.pipeline.samples.masking import MaskingRules, draw_sets
from cloze.pipeline.shards.manifest import ShardInfo
from cloze.pipeline.shards.shard_file import write_shard
from cloze.pipeline.storage import readable_errors, sha256_of
from cloze.pipeline.stores.places import Place, StorePath, to_place

_COPIES = 0  # purposes of random draws
_SAMPLES = 1
_MASKS = 2
_BEGINS = 1  # a marker, not a token id


@dataclass(frozen=True)
class BuildTask:
    """One shard of one split at one length: documents with low <= hash < high, for every pair set and mask set.

    Args:
        parts: names of the parts that hold these hashes, some hundred at most.
    """

    split: str
    number: int
    low: int
    high: int
    parts: list[str]
    weights: list[float]
    preparation: Fields
    tokenizer: str
    fingerprint: str
    vocab_size: int
    folder: str
    output: str

    @property
    def max_length(self) -> int:
        return self.preparation["max_length"]

    @property
    def pair_sets(self) -> int:
        return self.preparation["samples"]["pair_sets"] if self.split == "train" else 1

    def shard_file(self, pair_set: int) -> str:
        """The name of a shard below the output."""
        return f"{self.split}/shard-{self.number:05d}" + f"-pairs-{pair_set}" * (self.pair_sets > 1) + ".arrow"

    @property
    def report_path(self) -> Place:
        return to_place(self.folder) / f"{self.max_length}-{self.split}-{self.number:05d}.json"


@dataclass
class ShardReport:
    """The shards and counts of a task. unigrams (vocab_size,) uint32: occurrences of each id in the first pair set."""

    shards: list[ShardInfo]
    counts: dict[str, int]
    length_histogram: list[int]
    unigrams: np.ndarray

    def save(self, path: Place) -> None:
        packed = base64.b64encode(zlib.compress(self.unigrams.tobytes(), 1)).decode()
        save_report(path, asdict(replace(self, unigrams=np.empty(0))) | {"unigrams": packed})

    @classmethod
    def load(cls, task: BuildTask) -> "ShardReport | None":
        """The report of a complete task whose shards are intact; None if there is none."""
        files = [task.shard_file(pair_set) for pair_set in range(task.pair_sets)]
        of_shard = {each.name: is_count for each in fields(ShardInfo)} | {
            "file": lambda value: value in files,
            "sha256": is_text,
        }
        kinds = {
            "shards": lambda value: isinstance(value, list) and all(has_kinds(each, of_shard) for each in value),
            "counts": counts_by_name("documents"),
            "length_histogram": list_of_counts(task.max_length + 1),
            "unigrams": is_text,
        }
        if (content := load_report(task.report_path, kinds)) is None:
            return None
        unigrams = _unpacked(content["unigrams"], task.vocab_size)
        shards = [ShardInfo(**shard) for shard in content["shards"]]
        if unigrams is None or not all(_is_whole(shard, to_place(task.output)) for shard in shards):
            return None
        return cls(shards, content["counts"], content["length_histogram"], unigrams)


def _unpacked(packed: str, count: int) -> np.ndarray | None:
    """The `count` numbers of `ShardReport.save`; None if it has packed others."""
    size = count * np.dtype(np.uint32).itemsize
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(packed), size + 1)
    except (ValueError, zlib.error):
        return None
    return np.frombuffer(content, np.uint32) if len(content) == size else None


def _is_whole(shard: ShardInfo, output: Place) -> bool:
    """Whether a shard is complete. For an object in a store its size is enough, since objects are written
    atomically.
    """
    path = output / shard.file
    if isinstance(path, StorePath):
        return (info := path.info()) is not None and info.size == shard.bytes
    with readable_errors(path):
        return path.is_file() and path.stat().st_size == shard.bytes and sha256_of(path) == shard.sha256


def build(task: BuildTask) -> ShardReport:
    """Run one task, unless it is complete."""
    if (complete := ShardReport.load(task)) is not None:
        return complete
    tokenizer = load_tokenizer(task.tokenizer, task.fingerprint)
    documents, counts = collect(task, np.dtype(tokenizer.dtype))
    preparation = task.preparation
    builder = SampleBuilder(preparation["samples"], task.max_length, tokenizer.special_tokens)
    rules = MaskingRules(
        config=preparation["masking"],
        max_length=task.max_length,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        continues_word=tokenizer.continues_word,
    )
    report = ShardReport([], counts, [0] * (task.max_length + 1), np.zeros(tokenizer.vocab_size, np.uint32))
    for pair_set in range(task.pair_sets if len(documents) else 0):
        draws = (preparation["seed"], _SAMPLES, task.split, task.number, pair_set)
        samples, flow = builder.build(documents, draws)
        key = _number((preparation["seed"], _MASKS, task.split, task.number, pair_set))
        begins = None
        if tokenizer.first_word_differs and preparation["mask_sets"] and preparation["masking"]["strategy"] != "token":
            begins = builder.build(_marks(documents), draws)[0].input_ids == _BEGINS
        masks = draw_sets(rules, samples, key, preparation["mask_sets"], begins)
        report.shards.append(
            write_shard(
                to_place(task.output) / task.shard_file(pair_set),
                samples,
                masks,
                tokenizer.vocab_size,
                pair_set,
                preparation["shards"]["compression"],
                partial(check_ours, to_place(task.folder)),
            )
        )
        _count(report, samples, masks, flow, tokenizer.special_tokens.mask)
        histogram = np.bincount(samples.lengths, minlength=task.max_length + 1)
        report.length_histogram = (np.array(report.length_histogram) + histogram).tolist()
        if pair_set == 0:
            report.unigrams += np.bincount(samples.input_ids, minlength=tokenizer.vocab_size).astype(np.uint32)
    report.unigrams[tokenizer.special_tokens.ids] = 0
    report.save(task.report_path)
    return report


def _marks(documents: Documents) -> Documents:
    """The documents with _BEGINS as the first token of each sentence and 0 as all others; samples built from them mark
    the beginnings of sentences. Needed for tokenizers that include the space before a word: the first word of a line
    has no space, so its token does not show that a word begins.
    """
    marks = np.zeros_like(documents.tokens)
    starts = documents.sentence_offsets[:-1]
    marks[starts[starts < len(marks)]] = _BEGINS
    return replace(documents, tokens=marks)


def _number(key: tuple[int | str, ...]) -> tuple[int, ...]:
    """A key of numbers and names, as numbers for seeding numpy."""
    return tuple(int.from_bytes(part.encode(), "big") if isinstance(part, str) else part for part in key)


def _count(report: ShardReport, samples: Samples, masks: list[Masks], flow: dict[str, int], mask_id: int) -> None:
    labels = samples.next_sentence_label
    added = {
        **flow,
        "samples": len(samples),
        "tokens": len(samples.input_ids),
        "pairs": int((labels >= 0).sum()),
        "pairs_random": int((labels == 1).sum()),
    }
    if masks:
        first = masks[0]  # representative of all mask sets, which have the same distribution
        counts = np.diff(first.offsets)
        originals = samples.input_ids[np.repeat(samples.offsets[:-1], counts) + first.positions]
        added["masked"] = len(first.ids)
        added["masked_by_mask"] = int((first.ids == mask_id).sum())
        added["masked_kept"] = int((first.ids == originals).sum())
        added["masked_by_random"] = added["masked"] - added["masked_by_mask"] - added["masked_kept"]
    for name, count in added.items():
        report.counts[name] = report.counts.get(name, 0) + count


def collect(task: BuildTask, dtype: np.dtype) -> tuple[Documents, dict[str, int]]:
    """The documents of a task in the order of their hash, without duplicates and short ones; then, in the same order,
    the additional copies by the sources' weights.
    """
    tables = [parts.empty(dtype)]
    tables += parts.read_all(to_place(task.folder), task.parts, task.low, task.high, dtype)
    table = parts.joined(tables)
    num_sentences, num_tokens = table["num_sentences"].astype(np.int64), table["num_tokens"].astype(np.int64)
    rows, duplicates, duplicate_tokens = distinct(table)
    short = num_tokens[rows] < task.preparation["samples"]["min_document_tokens"]
    kept = rows[~short]
    counts = {
        "documents": len(kept),
        "documents_duplicate": int(duplicates.sum()),
        "documents_short": int(short.sum()),
        "tokens_duplicate": int(duplicate_tokens.sum()),
        "tokens_short": int(num_tokens[rows[short]].sum()),
        "tokens_kept": int(num_tokens[kept].sum()),
    }
    copies = _copies(task, table["source"][kept], table["hash_rest"][kept])
    counts["documents_with_copies"] = int(copies.sum())
    # All first copies, then all second copies: a sample across documents must not contain two copies of one.
    kept = np.concatenate([kept[:0], *(kept[copies > copy] for copy in range(copies.max(initial=0)))])
    sentences, tokens = table["sentences"], table["tokens"]
    sentence_starts = ragged.to_offsets(num_sentences)[:-1]
    token_starts = ragged.to_offsets(num_tokens)[:-1]
    lengths = ragged.gather(sentences, sentence_starts[kept], num_sentences[kept]).astype(np.int64)
    sentences_kept = num_sentences[kept]
    if task.preparation["samples"]["objective"] != "given_pairs" and not lengths.all():
        # Pairs may have an empty segment, which is not a sentence for other objectives.
        owner = np.repeat(np.arange(len(kept)), sentences_kept)[lengths > 0]
        sentences_kept = np.bincount(owner, minlength=len(kept))
        lengths = lengths[lengths > 0]
    documents = Documents(
        tokens=ragged.gather(tokens, token_starts[kept], num_tokens[kept]),
        sentence_offsets=ragged.to_offsets(lengths),
        document_offsets=ragged.to_offsets(sentences_kept),
        ids=table["document"][kept],
        keys=table["hash"][kept],
        sources=table["source"][kept].astype(np.uint16, copy=False),
    )
    return documents, counts


def _copies(task: BuildTask, source: np.ndarray, hash_rest: np.ndarray) -> np.ndarray:
    """Number of copies of each document: the integer part of its source's weight, and one more by its hash for the
    fraction.
    """
    weight = np.array(task.weights)[source.astype(np.int64)]
    seed = hashlib.sha256(f"{task.preparation['seed']}/{_COPIES}".encode()).digest()
    mixed = hash_rest ^ np.uint64(int.from_bytes(seed[:8], "big"))
    return np.floor(weight).astype(np.int64) + (mixed.astype(np.float64) / 2**64 < weight % 1)
