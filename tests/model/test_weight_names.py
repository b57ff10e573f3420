"""Weights under the names of transformers and back: nothing is lost, and what is not known is named."""

import pytest
import torch

from cloze.model import weight_names
from cloze.model.config import BertConfig, ModelError
from cloze.model.families.bert import Bert
from cloze.model.families.family import Part
from cloze.model.tasks import BertForMaskedLM
from cloze.model.weight_names import from_huggingface, to_huggingface
from tests.model.model_batches import TINY, pretraining_model, scramble


def test_the_mapping_is_its_own_inverse():
    weights = pretraining_model().state_dict()
    again = from_huggingface(to_huggingface(weights, TINY), TINY)
    assert set(again) == set(weights)
    for name in weights:
        rows = TINY.vocab_size if len(weights[name]) == TINY.padded_vocab_size else None
        assert torch.equal(again[name][:rows], weights[name][:rows]), name


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda weights: weights.update(stranger=torch.ones(1)), "stranger"),
        (lambda weights: weights.pop("bert.encoder.layer.1.attention.self.key.weight"), "layer.1.attention.self.key"),
    ],
)
def test_strangers_and_holes_in_a_checkpoint_are_named(change, found):
    weights = to_huggingface(pretraining_model().state_dict(), TINY)
    change(weights)
    with pytest.raises(ModelError, match=found):
        from_huggingface(weights, TINY)


class Divided(Bert):
    """Queries, keys and values in one tensor, the feed-forward network's halves too and the other way around."""

    structure = {"gated_feed_forward": True}
    layer = {**Bert.layer, "attention.qkv": ("attention.qkv",), "feed_forward.up": ()}

    def names(self, config, head=""):
        found, rows = super().names(config, head), config.intermediate_size
        for layer in range(config.num_hidden_layers):
            theirs = self.layers.format(layer)
            for kind in ("weight", "bias"):
                fused = f"{theirs}intermediate.{kind}"
                ours = f"bert.encoder.layers.{layer}.feed_forward.up.{kind}"
                found[ours] = (Part(fused, rows, rows), Part(fused, rows))
        return found


def test_rows_of_one_of_theirs_are_parts_of_ours(monkeypatch):
    config = BertConfig(**vars(TINY) | {"gated_feed_forward": True, "intermediate_size": 37})
    monkeypatch.setattr(weight_names, "family_for", lambda _: Divided())
    weights = scramble(BertForMaskedLM(config)).state_dict()
    theirs = weight_names.to_huggingface(weights, config)
    up = weights["bert.encoder.layers.1.feed_forward.up.weight"]
    fused = "bert.encoder.layer.1.intermediate.weight"
    assert torch.equal(theirs[fused], torch.cat((up[37:], up[:37])))
    again = weight_names.from_huggingface(theirs, config)
    assert again.keys() == weights.keys() and torch.equal(again["bert.encoder.layers.1.feed_forward.up.weight"], up)
    theirs[fused] = theirs[fused][:-1]
    with pytest.raises(ModelError, match=r"intermediate.weight: found shape \(73, 32\), expected \(74, 32\)"):
        weight_names.from_huggingface(theirs, config)
