"""`cloze inspect`: statistics and decoded samples of a prepared folder."""

from dataclasses import dataclass

import numpy as np

from cloze.pipeline.config import InspectConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.streams import masks_per_sample, take_masked
from cloze.pipeline.records import NO_LABEL
from cloze.pipeline.shards.manifest import HOW_MASKED, REPAIR, Manifest
from cloze.pipeline.shards.reader import ShardReader
from cloze.pipeline.shards.shard_file import BLOCK_TOKENS
from cloze.pipeline.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """One token of a sample.

    Args:
        kind: "plain", "special", "masked", "random" or "kept" (the last three are predicted).
        original: the token to predict there, or None.
    """

    text: str
    kind: str
    original: str | None = None


@dataclass(frozen=True)
class DecodedSample:
    """A decoded sample.

    Args:
        label: "follows", "random", "swapped", or None.
    """

    index: int
    pieces: list[Piece]
    segment_b_start: int
    label: str | None
    document: int


@dataclass(frozen=True)
class Inspection:
    """What `cloze inspect` shows of a prepared folder.

    Args:
        facts: rows (name, value) of a table.
        histogram: (first length, last length, number of samples).
    """

    manifest: Manifest
    facts: list[tuple[str, str]]
    histogram: list[tuple[int, int, int]]
    samples: list[DecodedSample]


def inspect(config: InspectConfig) -> Inspection:
    """Read a prepared folder.

    Raises:
        UserError: it isn't one, or the mask set isn't there.
    """
    manifest = Manifest.load(config.data)
    reader = ShardReader(config.data, config.split)
    return Inspection(
        manifest=manifest,
        facts=facts(manifest),
        histogram=histogram(manifest.splits[config.split].length_histogram),
        samples=decode(reader, config),
    )


def total(manifest: Manifest, name: str) -> int:
    """A count over all splits."""
    return sum(split.counts.get(name, 0) for split in manifest.splits.values())


def tokens_lost(manifest: Manifest) -> int:
    """Tokens that are missing from the counts: 0 unless there is a bug."""
    read, duplicate, short = (manifest.counts.get(name, 0) for name in ("tokens", "tokens_duplicate", "tokens_short"))
    kept = read - duplicate - short
    collected = total(manifest, "tokens_kept")
    flow = total(manifest, "tokens_in") + total(manifest, "tokens_borrowed") - total(manifest, "tokens_left_out")
    return (kept - collected) + (flow - total(manifest, "tokens_out"))


def facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Facts of the manifest, for a table."""
    counts = manifest.counts
    rows = [
        ("objective", f"{manifest.objective}, length {manifest.max_length}"),
        ("vocabulary", f"{manifest.vocab_size:,} entries, fingerprint {manifest.tokenizer_fingerprint[:12]}"),
        ("documents", f"{counts.get('documents', 0):,}"),
        ("duplicates dropped", f"{counts.get('documents_duplicate', 0):,}"),
        ("empty or short documents", f"{counts.get('documents_empty', 0) + counts.get('documents_short', 0):,}"),
        ("sentences", f"{counts.get('sentences', 0):,}"),
    ]
    if damaged := counts.get("documents_with_encoding_errors"):
        rows.append(("documents with encoding errors", f"{damaged:,} (what wasn't UTF-8 is U+FFFD now)"))
    for name, split in manifest.splits.items():
        if any(split.shards.samples):
            size, tokens = sum(shard.bytes for shard in split.shards), split.counts["tokens"]
            # Below a block a shard, what a file says of itself is much of it, and bytes a token say nothing.
            is_small = tokens < BLOCK_TOKENS * len(split.shards)
            rows.append(
                (
                    name,
                    f"{split.counts['samples']:,} samples, {tokens:,} tokens, {len(split.shards)} shards, "
                    + (f"{size / 1000:,.1f} kB" if is_small else f"{size / tokens:.2f} bytes a token"),
                )
            )
    if pairs := total(manifest, "pairs"):
        share = total(manifest, "pairs_random") / pairs
        name = _other_segment(manifest)
        why = ""
        expected = manifest.preparation["samples"]["random_share"]
        if abs(share - expected) > 4 * (expected * (1 - expected) / pairs) ** 0.5 + 0.002:
            why = f" (configured {expected:.0%}; the end of a document that is one sentence can only get a random B)"
        rows.append((f"{name} second segments", f"{share:.1%} of {pairs:,}{why}"))
    masking = manifest.masking
    if manifest.mask_sets:
        masked = total(manifest, "masked")
        shares = [total(manifest, f"masked_{name}") / max(1, masked) for name in HOW_MASKED]
        rows.append(
            (
                "masked",
                f"{masked / max(1, total(manifest, 'tokens')):.2%} of the tokens ({masking['strategy']}), of these "
                f"{shares[0]:.1%} mask, {shares[1]:.1%} random, {shares[2]:.1%} kept; {manifest.mask_sets} mask sets",
            )
        )
    else:
        shares = [masking["mask_share"], masking["random_share"]]
        rows.append(
            (
                "masked",
                f"at load time, {masking['rate']:.0%} of the tokens ({masking['strategy']}), of which {shares[0]:.0%} "
                f"mask, {shares[1]:.0%} random, {abs(1 - sum(shares)):.0%} kept",
            )
        )
    rows.append(("borrowed by random segments", f"{total(manifest, 'tokens_borrowed'):,} tokens"))
    if left_out := total(manifest, "tokens_left_out"):
        rows.append(("left out of given pairs", f"{left_out:,} tokens"))
    rows.append(("tokens lost", f"{tokens_lost(manifest):,}"))
    rows.append(("unigram entropy", f"{manifest.unigram_entropy:.3f} nats (an MLM must get below it)"))
    return rows


def _other_segment(manifest: Manifest) -> str:
    """What a second segment is that does not follow the first."""
    return "swapped" if manifest.objective == "sentence_order" else "random"


def histogram(lengths: list[int]) -> list[tuple[int, int, int]]:
    """Sixteen ranges of lengths, and the number of samples in each."""
    width = max(1, -(-(len(lengths) - 1) // 16))
    counts = np.array(lengths[1:])
    return [
        (start + 1, min(start + width, len(counts)), int(counts[start : start + width].sum()))
        for start in range(0, len(counts), width)
    ]


def decode(reader: ShardReader, config: InspectConfig) -> list[DecodedSample]:
    """Samples spread evenly over the split, with the masks of one set."""
    manifest, count = reader.manifest, min(config.samples, reader.num_samples)
    if not count:
        return []
    tokenizer = Tokenizer.from_folder(manifest.tokenizer_folder)
    if fault := tokenizer.fault_in(manifest):
        raise UserError(f"{fault}; {REPAIR}")
    indices = np.linspace(0, reader.num_samples - 1, count).astype(np.int64)
    samples, masks = take_masked(reader, masks_per_sample(reader), indices, config.mask_set, manifest.seed)
    decoded, other = [], _other_segment(manifest)
    for number, index in enumerate(indices):
        ids = samples.input_ids[samples.offsets[number] : samples.offsets[number + 1]]
        low, high = masks.offsets[number], masks.offsets[number + 1]
        masked = dict(zip(masks.positions[low:high].tolist(), masks.ids[low:high].tolist(), strict=True))
        pieces = [_piece(position, int(original), masked, tokenizer) for position, original in enumerate(ids)]
        label = int(samples.next_sentence_label[number])
        decoded.append(
            DecodedSample(
                index=int(index),
                pieces=pieces,
                segment_b_start=int(samples.segment_b_start[number]),
                label=None if label == NO_LABEL else ("follows", other)[label],
                document=int(samples.document[number]),
            )
        )
    return decoded


def _piece(position: int, original: int, masked: dict[int, int], tokenizer: Tokenizer) -> Piece:
    tokens = tokenizer.tokens
    if position not in masked:
        return Piece(tokens[original], "special" if original in tokenizer.special_tokens.ids else "plain")
    shown = masked[position]
    kind = "masked" if shown == tokenizer.special_tokens.mask else "kept" if shown == original else "random"
    return Piece(tokens[shown], kind, tokens[original])
