"""Shards made of numbers, for tests of training: lengths and masked counts differ as widely as a test wants."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from cloze.pipeline.config import MaskingConfig, SamplesConfig
from cloze.pipeline.records import Masks, Samples, SpecialTokens
from cloze.pipeline.shards.manifest import Manifest, ShardTable, SplitInfo
from cloze.pipeline.shards.shard_file import write_shard
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer

NAMES = {"pad": "[PAD]", "unknown": "[UNK]", "classification": "[CLS]", "separator": "[SEP]", "mask": "[MASK]"}
SPECIAL = SpecialTokens(pad=0, unknown=1, classification=2, separator=3, mask=4)


def make_shards(
    folder: Path,
    *,
    train: int = 200,
    validation: int = 24,
    vocab_size: int = 64,
    max_length: int = 32,
    mask_sets: int = 2,
    pairs: bool = True,
    seed: int = 0,
    pad_id: int = 0,
) -> Path:
    """A prepared folder whose words follow each other in cycles, so that a model can learn something.

    Samples have 6 to max_length tokens, and 1 token to a third of their tokens is masked; with mask_sets=0 masks are
    drawn at load time, at the usual rate.
    """
    words = [f"w{number}" for number in range(vocab_size - len(NAMES))]
    special = [*NAMES.values()]
    special[0], special[pad_id] = special[pad_id], special[0]
    backend = wordpiece_backend({name: i for i, name in enumerate([*special, *words])}, NAMES, True, None)
    tokenizer = Tokenizer(backend, NAMES)
    tokenizer.save(folder / "tokenizer")
    rng = np.random.default_rng(seed)
    masking = MaskingConfig(mode="precomputed" if mask_sets else "dynamic")
    splits = {}
    for name, count in (("train", train), ("validation", validation), ("test", 0)):
        samples = _samples(rng, count, vocab_size, max_length, pairs)
        masks = [_masks(rng, samples, vocab_size) for _ in range(mask_sets)]
        # Three shards, of different sizes, so that reading crosses their borders.
        cuts = [0, count // 5, count // 2, count] if count else []
        shards = [
            write_shard(
                folder / name / f"shard-{number:05d}.arrow",
                samples.part(low, high),
                [_part_of_masks(m, low, high) for m in masks],
                vocab_size,
                0,
                "zstd",
            )
            for number, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False))
        ]
        counts = {"samples": count, "tokens": len(samples.input_ids)}
        if masks:
            counts["masked"] = len(masks[0].ids)
        splits[name] = SplitInfo(
            counts, np.bincount(samples.lengths, minlength=max_length + 1).tolist(), ShardTable.of(shards)
        )
    Manifest(
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        objective="next_sentence",
        max_length=max_length,
        mask_sets=mask_sets,
        pair_sets=1,
        seed=seed,
        preparation={"samples": asdict(SamplesConfig()), "masking": asdict(masking)},
        sources=[],
        counts={},
        unigram_entropy=float(np.log(len(words))),
        splits=splits,
    ).save(folder)
    return folder


def _samples(rng, count: int, vocab_size: int, max_length: int, pairs: bool) -> Samples:
    rows, starts, labels = [], [], []
    for _ in range(count):
        length = int(rng.integers(6, max_length + 1))
        middle = int(rng.integers(3, length - 2)) if pairs else length
        first = 5 + (rng.integers(vocab_size - 5) + np.arange(length)) % (vocab_size - 5)
        label = int(rng.integers(2)) if pairs else -100
        if label == 1:
            first[middle:] = 5 + (first[middle:] * 7) % (vocab_size - 5)
        first[0], first[-1] = SPECIAL.classification, SPECIAL.separator
        if pairs:
            first[middle - 1] = SPECIAL.separator
        rows.append(first)
        starts.append(middle)
        labels.append(label)
    ids = np.concatenate(rows).astype(np.uint16) if rows else np.empty(0, np.uint16)
    return Samples(
        ids,
        np.cumsum([0, *map(len, rows)]),
        np.array(starts, np.uint16),
        np.array(labels, np.int8),
        np.arange(count, dtype=np.uint64),
        np.zeros(count, np.uint16),
    )


def _masks(rng, samples: Samples, vocab_size: int) -> Masks:
    positions, ids = [], []
    for low, high in zip(samples.offsets, samples.offsets[1:], strict=False):
        ordinary = np.flatnonzero(samples.input_ids[low:high] > SPECIAL.mask)
        count = int(rng.integers(1, max(2, len(ordinary) // 3 + 1)))
        chosen = np.sort(rng.choice(ordinary, count, replace=False))
        positions.append(chosen)
        ids.append(np.where(rng.random(count) < 0.8, SPECIAL.mask, rng.integers(5, vocab_size, count)))
    flat = np.concatenate(positions) if positions else np.empty(0)
    return Masks(
        flat.astype(np.uint16),
        (np.concatenate(ids) if ids else np.empty(0)).astype(np.uint16),
        np.cumsum([0, *map(len, positions)]),
    )


def _part_of_masks(masks: Masks, low: int, high: int) -> Masks:
    start, stop = masks.offsets[low], masks.offsets[high]
    return Masks(masks.positions[start:stop], masks.ids[start:stop], masks.offsets[low : high + 1] - start)
