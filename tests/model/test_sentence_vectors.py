"""One vector per text."""

import pytest
import torch

from cloze.model.bert import BertModel
from cloze.model.config import ModelError
from cloze.model.sentence_vectors import pool
from tests.model.model_batches import TINY, assert_equal_gradients, both_inputs, scramble, theirs_of
from tests.model.test_encoder import TOLERANCE, weighted


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_the_bare_encoder_and_its_four_poolings(checkpointing):
    model = scramble(BertModel(TINY, gradient_checkpointing=checkpointing))
    padded, inputs, flat = both_inputs()
    mask = padded["attention_mask"].bool()
    theirs = theirs_of(model)
    expected = theirs(**inputs)
    ours, ours_flat = model(**inputs), model(**flat)
    torch.testing.assert_close(ours.last_hidden_state, expected.last_hidden_state, **TOLERANCE)
    torch.testing.assert_close(ours_flat.last_hidden_state, expected.last_hidden_state[mask], **TOLERANCE)
    weighted(expected.last_hidden_state[mask], expected.pooler_output).backward()
    for output, hidden in ((ours, ours.last_hidden_state[mask]), (ours_flat, ours_flat.last_hidden_state)):
        torch.testing.assert_close(output.pooled_output, expected.pooler_output, **TOLERANCE)
        model.zero_grad()
        weighted(hidden, output.pooled_output).backward()
        assert_equal_gradients(model, theirs)
    rows = [states[seen] for states, seen in zip(expected.last_hidden_state, mask, strict=True)]
    by_hand = {
        "cls": torch.stack([row[0] for row in rows]),
        "mean": torch.stack([row.mean(0) for row in rows]),
        "max": torch.stack([row.amax(0) for row in rows]),
    }
    for kind, wanted in by_hand.items():
        for form in (mask.long(), mask.sum(1)):
            torch.testing.assert_close(pool(ours.last_hidden_state, kind, None, form), wanted, **TOLERANCE)
        flat_pooled = pool(ours_flat.last_hidden_state, kind, flat["sequence_offsets"])
        torch.testing.assert_close(flat_pooled, wanted, **TOLERANCE)
    with pytest.raises(ModelError, match="pooling"):
        pool(ours.last_hidden_state, "median")
