"""Samples and sequences to tensors: the sequences of a micro-batch are concatenated, without padding.

The keys of the dict are parameters of `BertForPreTraining.forward`; it is made only by `concatenated`.
"""

import numpy as np
import torch

from cloze.pipeline import ragged
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.records import NO_LABEL, Masks, Samples


def concatenated(
    input_ids: np.ndarray,
    offsets: np.ndarray,
    segment_b_start: np.ndarray,
    sizes: np.ndarray,
    segments: tuple[int, int] = (0, 1),
) -> list[Fields]:
    """Inputs of a model's forward for sequences, in micro-batches of `sizes` sequences each, over shared memory.

    Args:
        input_ids: int64 (T,), special tokens included.
        offsets: (N+1,), first token of each sequence.
        segment_b_start: (N,), first position of each second segment; the length, or more, without one.
        sizes: int64 (micro-batches,), all above 0.
        segments: the model's segment ids of A and B.

    Returns:
        For each micro-batch of B sequences and T tokens input_ids, token_type_ids, position_ids: int64 (T,);
        sequence_offsets: int32 (B+1,); max_sequence_length: int.
    """
    bounds, lengths = ragged.to_offsets(sizes), np.diff(offsets)
    starts = offsets[bounds]  # of micro-batches, in tokens
    first = np.minimum(segment_b_start, lengths)  # tokens of segment A
    of_segments = np.stack([first, lengths - first], axis=1).ravel()
    local = offsets[ragged.ranges(bounds[:-1], sizes + 1)] - np.repeat(starts[:-1], sizes + 1)
    by_tokens = np.diff(starts).tolist()
    columns = {
        "input_ids": (input_ids, by_tokens),
        "token_type_ids": (np.repeat(np.tile(np.array(segments, np.int64), len(lengths)), of_segments), by_tokens),
        "position_ids": (ragged.within(offsets), by_tokens),
        "sequence_offsets": (local.astype(np.int32), (sizes + 1).tolist()),
    }
    longest = np.maximum.reduceat(lengths, bounds[:-1]).tolist()
    return [batch | {"max_sequence_length": most} for batch, most in zip(_split(columns), longest, strict=True)]


def _split(columns: dict[str, tuple[np.ndarray, list[int]]]) -> list[Fields]:
    """A dict of tensors for each micro-batch, from flat arrays with the lengths of their parts in each."""
    # Like `torch.split`, but the parts are not views for autograd, which would restrict changes in place.
    parts = [torch.unsafe_split_with_sizes(torch.from_numpy(values), counts) for values, counts in columns.values()]
    return [dict(zip(columns, tensors, strict=True)) for tensors in zip(*parts, strict=True)]


def collate(samples: Samples, masks: Masks, segments: tuple[int, int] = (0, 1)) -> Fields:
    """Make one micro-batch of B samples, T tokens, M masked tokens.

    Returns
    -------
    input_ids, token_type_ids, position_ids: int64 (T,); the ids have the masks applied
    sequence_offsets: int32 (B+1,), cumulative lengths
    max_sequence_length: int, the longest sequence, known on the host
    masked_positions: int64 (M,), indices into T
    labels: int64 (M,), the original ids there
    next_sentence_label: int64 (B,), 0 follows / 1 random, -100 none

    Args:
        segments: the model's segment ids of A and B.
    """
    (batch,) = collate_several(samples, masks, np.array([len(samples)]), segments)
    return batch


def collate_several(
    samples: Samples, masks: Masks, sizes: np.ndarray, segments: tuple[int, int] = (0, 1), next_tokens: bool = False
) -> list[Fields]:
    """Make several micro-batches of `sizes` samples each, as `collate`, over shared memory. Made together, small
    micro-batches cost no more per sample than large ones.

    Args:
        next_tokens: not masked, every token but the last of a sample has the next one as its label, and attention is
            causal (with the key `causal`); pairs have no label, since the first token sees no other.
    """
    bounds = ragged.to_offsets(sizes)
    starts = samples.offsets[bounds]  # of micro-batches, in tokens
    input_ids, pairs = samples.input_ids.astype(np.int64), samples.next_sentence_label.astype(np.int64)
    if next_tokens:
        has_next = np.ones(len(input_ids), bool)
        has_next[samples.offsets[1:] - 1] = False
        predicted_bounds = starts - bounds
        positions = np.flatnonzero(has_next)
        labels = input_ids[positions + 1]
        pairs = np.full_like(pairs, NO_LABEL)
    else:
        predicted_bounds = masks.offsets[bounds]
        positions = np.repeat(samples.offsets[:-1], np.diff(masks.offsets))
        positions += masks.positions
        labels = input_ids[positions]
        input_ids[positions] = masks.ids
    by_predicted = np.diff(predicted_bounds)
    positions -= np.repeat(starts[:-1], by_predicted)
    predicted = _split(
        {
            "masked_positions": (positions, by_predicted.tolist()),
            "labels": (labels, by_predicted.tolist()),
            "next_sentence_label": (pairs, sizes.tolist()),
        }
    )
    batches = concatenated(input_ids, samples.offsets, samples.segment_b_start, sizes, segments)
    attention = {"causal": True} if next_tokens else {}
    return [batch | more | attention for batch, more in zip(batches, predicted, strict=True)]


def without_loss(batch: MicroBatch) -> MicroBatch:
    """The batch with all labels ignored: a filler for ranks without samples."""
    return {
        **batch,
        "labels": torch.full_like(batch["labels"], NO_LABEL),
        "next_sentence_label": torch.full_like(batch["next_sentence_label"], NO_LABEL),
    }


def pad(
    batch: MicroBatch, length: int, *, pad_id: int = 0, ignore_index: int = NO_LABEL, segment_padding: int = 0
) -> MicroBatch:
    """Pad a micro-batch to rows of one length, for models with inputs (B, length).

    Returns:
        Input_ids, token_type_ids, labels (`ignore_index` where nothing is predicted) and attention_mask (1 on tokens),
        int64 (B, length), and next_sentence_label, int64 (B,).

    Raises:
        UserError: a sample is longer than `length`, or the batch has next tokens, for which attention is causal.
    """
    if batch.get("causal"):
        raise UserError("batch: found next tokens, expected masked ones: attention_mask would show the labels")
    if batch["max_sequence_length"] > length:
        raise UserError(f"length: found {length}, expected at least {batch['max_sequence_length']}, the longest sample")
    rows = len(batch["sequence_offsets"]) - 1
    row = torch.repeat_interleave(torch.arange(rows), torch.diff(batch["sequence_offsets"]).long())
    place = row * length + batch["position_ids"]
    masked = place[batch["masked_positions"]]

    def filled(value: int, at: torch.Tensor, values: torch.Tensor | int) -> torch.Tensor:
        flat = torch.full((rows * length,), value, dtype=torch.int64)
        flat[at] = values
        return flat.view(rows, length)

    return {
        "input_ids": filled(pad_id, place, batch["input_ids"]),
        "token_type_ids": filled(segment_padding, place, batch["token_type_ids"]),
        "labels": filled(ignore_index, masked, batch["labels"]),
        "attention_mask": filled(0, place, 1),
        "next_sentence_label": batch["next_sentence_label"],
    }
