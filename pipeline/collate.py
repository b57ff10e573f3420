"""Samples to tensors: the sequences of a micro-batch one after another, without padding.

The keys of the dict are parameters of `BertForPreTraining.forward`.
"""

import numpy as np
import torch

from pipeline import ragged
from pipeline.records import NO_LABEL, Masks, Samples


def collate(samples: Samples, masks: Masks) -> dict:
    """Make one micro-batch of B samples, T tokens, M masked tokens.

    Returns
    -------
    input_ids, token_type_ids, position_ids: int64 (T,); the ids have the masks applied
    sequence_offsets: int32 (B+1,), cumulative lengths
    max_sequence_length: int, the longest sequence, known on the host
    masked_positions: int64 (M,), indices into T
    labels: int64 (M,), the original ids there
    next_sentence_label: int64 (B,), 0 follows / 1 random, -100 none
    """
    lengths = samples.lengths
    position_ids = ragged.within(samples.offsets)
    masked_positions = np.repeat(samples.offsets[:-1], np.diff(masks.offsets))
    masked_positions += masks.positions
    input_ids = samples.input_ids.astype(np.int64)
    labels = input_ids[masked_positions]
    input_ids[masked_positions] = masks.ids
    token_type_ids = position_ids >= np.repeat(samples.segment_b_start.astype(np.int64), lengths)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "token_type_ids": torch.from_numpy(token_type_ids.astype(np.int64)),
        "position_ids": torch.from_numpy(position_ids),
        "sequence_offsets": torch.from_numpy(samples.offsets.astype(np.int32)),
        "max_sequence_length": int(lengths.max()),
        "masked_positions": torch.from_numpy(masked_positions),
        "labels": torch.from_numpy(labels),
        "next_sentence_label": torch.from_numpy(samples.next_sentence_label.astype(np.int64)),
    }


def without_loss(batch: dict) -> dict:
    """The same batch with nothing to predict: what a rank gets that has no sample left."""
    return {
        **batch,
        "labels": torch.full_like(batch["labels"], NO_LABEL),
        "next_sentence_label": torch.full_like(batch["next_sentence_label"], NO_LABEL),
    }
