"""What a batch of tensors holds."""

import dataclasses
import inspect

import numpy as np
import pytest

from tests.pipeline.loading.test_batches import take

pytestmark = pytest.mark.usefixtures("small_units")


def test_padding_and_fields(data):
    (batch,) = take(data, 1)
    padding = 0
    for micro in batch.micro_batches:
        lengths = np.diff(micro["sequence_offsets"])
        padding += int((lengths.max() - lengths).sum())
    assert batch.num_padding == padding
    assert {field.name for field in dataclasses.fields(batch)} >= {"num_tokens", "num_masked", "num_pairs"}


def test_the_keys_are_parameters_of_forward():
    bert = pytest.importorskip("cloze.model.bert")
    from cloze.pipeline.loading.collate import collate

    keys = {
        "input_ids",
        "token_type_ids",
        "position_ids",
        "sequence_offsets",
        "max_sequence_length",
        "masked_positions",
        "labels",
        "next_sentence_label",
    }
    assert keys <= set(inspect.signature(bert.BertForPreTraining.forward).parameters)
    assert all(key in collate.__doc__ for key in keys)
