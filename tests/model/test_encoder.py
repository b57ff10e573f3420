"""The bare encoder against transformers' BertModel: poolings, every form of its inputs, head masks, cross-attention."""

import dataclasses

import pytest
import torch

from cloze.model.bert import BertModel
from cloze.model.config import ModelError
from tests.model.model_batches import TINY, TOLERANCE, assert_equal_gradients, both_inputs, scramble, theirs_of


def weighted(*vectors):
    """A loss that every number moves in a way of its own."""
    return sum((each * torch.arange(each.numel()).view_as(each).cos()).sum(-1).mean() for each in vectors)


def test_inputs_may_be_embeddings_and_positions_may_be_given():
    model = scramble(BertModel(TINY))
    _, inputs, _ = both_inputs()
    positions = torch.arange(48).flip(0).expand(5, -1)
    theirs = theirs_of(model)
    ids = inputs.pop("input_ids")
    vectors = model.embeddings.word(ids)
    expected = theirs(inputs_embeds=vectors, position_ids=positions, **inputs).last_hidden_state
    ours = model(inputs_embeds=vectors, position_ids=positions, **inputs).last_hidden_state
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_head_mask_multiplies_the_probabilities_of_heads(per_layer):
    """transformers 5 has no head mask: a head is masked there by zeroing what its output is multiplied with."""
    model = scramble(BertModel(TINY)).eval()
    _, inputs, flat = both_inputs()
    mask = torch.tensor([1.0, 0.0, 0.5, 1.0])
    if per_layer:
        mask = torch.stack((mask, mask.flip(0), torch.ones(4)))
    ours = model(**flat, head_mask=mask).last_hidden_state
    expected = masked_by_weights(theirs_of(model), mask)(**inputs).last_hidden_state
    torch.testing.assert_close(ours, expected[inputs["attention_mask"].bool()], **TOLERANCE)

    config = dataclasses.replace(TINY, is_decoder=True, add_cross_attention=True)
    decoder = scramble(BertModel(config)).eval()
    inputs["encoder_hidden_states"] = torch.randn(5, 11, 32, generator=torch.Generator().manual_seed(2))
    expected = masked_by_weights(theirs_of(decoder, use_cache=False), mask)(**inputs).last_hidden_state
    torch.testing.assert_close(decoder(**inputs, head_mask=mask).last_hidden_state, expected, **TOLERANCE)


def masked_by_weights(theirs, mask):
    with torch.no_grad():
        for layer, factors in zip(theirs.eval().encoder.layer, mask.expand(3, 4), strict=True):
            columns = factors.repeat_interleave(TINY.head_size)
            layer.attention.output.dense.weight *= columns
            if hasattr(layer, "crossattention"):
                layer.crossattention.output.dense.weight *= columns
    return theirs


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_a_decoder_with_cross_attention_matches_the_reference(checkpointing):
    config = dataclasses.replace(TINY, is_decoder=True, add_cross_attention=True)
    model = scramble(BertModel(config, gradient_checkpointing=checkpointing))
    _, inputs, flat = both_inputs()
    states = torch.randn(5, 11, TINY.hidden_size, generator=torch.Generator().manual_seed(2), requires_grad=True)
    seen = torch.arange(11) < torch.tensor([11, 4, 1, 7, 10])[:, None]
    theirs = theirs_of(model, use_cache=False)
    crossed = dict(encoder_hidden_states=states, encoder_attention_mask=seen.long())
    expected = theirs(**inputs, **crossed, output_attentions=True)
    mask = inputs["attention_mask"].bool()
    weighted(expected.last_hidden_state[mask]).backward()
    to_states, states.grad = states.grad, None
    for kernel in ("eager", "sdpa"):
        model.attention_kernel = kernel
        ours = model(**inputs, **crossed)
        torch.testing.assert_close(ours.last_hidden_state, expected.last_hidden_state, **TOLERANCE)
        model.zero_grad()
        weighted(ours.last_hidden_state[mask]).backward()
        assert_equal_gradients(model, theirs)
        torch.testing.assert_close(states.grad, to_states, **TOLERANCE)
        states.grad = None
    asked = model(**inputs, **crossed, output_attentions=True)
    torch.testing.assert_close(asked.cross_attentions[2], expected.cross_attentions[2], **TOLERANCE)
    alone = model(**flat).last_hidden_state  # causal, without an encoder to attend to
    torch.testing.assert_close(alone, theirs(**inputs).last_hidden_state[mask], **TOLERANCE)
    for form in (seen.sum(1), seen[:, None].expand(-1, 48, -1)):
        ours = model(**inputs, **crossed | {"encoder_attention_mask": form}).last_hidden_state
        torch.testing.assert_close(ours, expected.last_hidden_state, **TOLERANCE)
    bare = model(**inputs, encoder_hidden_states=states).last_hidden_state
    one = torch.ones(5, 48, 11)
    one[0, 7, :10] = 0  # token 7 alone sees nothing but the last
    seventh = model(**inputs, encoder_hidden_states=states, encoder_attention_mask=one).last_hidden_state
    assert torch.equal(seventh[:, :7], bare[:, :7]) and not torch.equal(seventh[0, 7], bare[0, 7])
    for form in (seen[:4], seen[:, :10], seen[0, :7], one[:, :3], one[:, None]):
        with pytest.raises(ModelError, match=r"encoder_attention_mask: found shape .* \(5,\) lengths, \(5, 11\) or"):
            model(**inputs, encoder_hidden_states=states, encoder_attention_mask=form)
    for shape in ((5, 11), (4, 11, 32), (5, 11, 31)):
        with pytest.raises(ModelError, match=r"encoder_hidden_states: found shape .* \(5, S', 32\)"):
            model(**inputs, encoder_hidden_states=torch.zeros(shape))
    with pytest.raises(ModelError, match="padded"):
        model(**flat, **crossed)
    with pytest.raises(ModelError, match="add_cross_attention"):
        BertModel(TINY)(**inputs, **crossed)
