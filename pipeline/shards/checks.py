"""Checks the content of a block before it is used: a file with the right hashes may still have been made to harm.

Arrow trusts offsets when it reads, and so do numpy's views of its buffers: what points outside of them would read
foreign memory, or end the process.
"""

import numpy as np
import pyarrow as pa

from cloze.pipeline import ragged
from cloze.pipeline.records import INPUT_IDS, NEXT_SENTENCE_LABEL, SEGMENT_B_START, mask_columns


def block_fault(batch: pa.RecordBatch, mask_set: int | None, vocab_size: int, max_length: int) -> str | None:
    """What is wrong with a block, or None.

    Args:
        batch: the base columns, and those of a mask set; its buffers have the sizes that their lengths ask for
            (`batch.validate`).
        mask_set: None: without masks.
        vocab_size: all ids are below it.
        max_length: tokens of the longest sample that the manifest allows.
    """
    offsets = ragged.from_arrow(batch.column(INPUT_IDS).offsets)
    ids = ragged.from_arrow(batch.column(INPUT_IDS).values)
    if fault := _offsets_fault(INPUT_IDS, offsets, len(ids)):
        return fault
    lengths = np.diff(offsets)
    if len(lengths) and (lengths.min() < 1 or lengths.max() > max_length):
        return f"{INPUT_IDS}: found samples of {lengths.min()} to {lengths.max()} tokens, expected 1 to {max_length}"
    if fault := _ids_fault(INPUT_IDS, ids, vocab_size):
        return fault
    second = ragged.from_arrow(batch.column(SEGMENT_B_START))
    if (second > lengths).any():
        row = int(np.argmax(second > lengths))
        return f"{SEGMENT_B_START}: found {second[row]} in a sample of {lengths[row]} tokens, expected at most that"
    labels = batch.column(NEXT_SENTENCE_LABEL)
    # Without a number the library counts by the bits, which are what the nulls are read by.
    counted = pa.Array.from_buffers(labels.type, len(labels), labels.buffers(), offset=labels.offset)
    if labels.null_count != counted.null_count:
        return f"{NEXT_SENTENCE_LABEL}: found {labels.null_count} nulls, expected {counted.null_count}, as its bits say"
    if labels.null_count < len(labels):
        known = ragged.from_arrow(labels, null=0)
        if known.min() < 0 or known.max() > 1:
            return f"{NEXT_SENTENCE_LABEL}: found {known.min()} to {known.max()}, expected 0, 1 or null"
    return None if mask_set is None else _masks_fault(batch, mask_set, lengths, vocab_size)


def _masks_fault(batch: pa.RecordBatch, mask_set: int, lengths: np.ndarray, vocab_size: int) -> str | None:
    """lengths (B,): tokens of each sample."""
    names = mask_columns(mask_set)
    (positions, bounds), (ids, id_bounds) = (
        (ragged.from_arrow(batch.column(name).values), ragged.from_arrow(batch.column(name).offsets)) for name in names
    )
    for name, offsets, values in ((names[0], bounds, positions), (names[1], id_bounds, ids)):
        if fault := _offsets_fault(name, offsets, len(values)):
            return fault
    counts = np.diff(bounds)
    if not np.array_equal(counts, np.diff(id_bounds)):
        return f"{names[1]}: found other numbers of masked ids than of positions in {names[0]}, expected the same"
    if (positions >= np.repeat(lengths, counts)).any():
        return f"{names[0]}: found a masked position outside of its sample"
    descends = positions[1:] <= positions[:-1]
    first = np.cumsum(counts)[:-1] - 1  # from the last position of a sample to the first of the next
    descends[first[(first >= 0) & (first < len(descends))]] = False
    if descends.any():
        return f"{names[0]}: found masked positions that do not ascend"
    return _ids_fault(names[1], ids, vocab_size)


def _offsets_fault(name: str, offsets: np.ndarray, size: int) -> str | None:
    if len(offsets) and (offsets[0] != 0 or offsets[-1] != size or (offsets[1:] < offsets[:-1]).any()):
        return f"{name}: found offsets that do not ascend from 0 to {size}, the number of its values"
    return None


def _ids_fault(name: str, ids: np.ndarray, vocab_size: int) -> str | None:
    if len(ids) and (largest := int(ids.max())) >= vocab_size:
        return f"{name}: found the id {largest}, expected ids below the vocabulary's size {vocab_size}"
    return None
