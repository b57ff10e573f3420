"""The table of families: names in both directions, and parameters that are divided otherwise there than here."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from cloze.model import huggingface
from cloze.model.config import BertConfig, ModelError
from cloze.model.families import BY_TYPE, FAMILIES, OUR_CLASSES, family_for, family_of
from cloze.model.families.bert import Bert
from cloze.model.families.family import HEADS, Part
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM
from tests.model.model_batches import TINY, scramble


def test_a_model_type_has_one_family_which_the_configuration_names_if_no_other_field_tells_it():
    kinds = [kind for family in FAMILIES for kind in family.beginnings]
    assert len(kinds) == len(set(kinds)) and list(BY_TYPE) == kinds
    named = {kind for family in FAMILIES if family.named for kind in family.beginnings}
    assert named == set(get_args(get_type_hints(BertConfig)["family"]))


def test_the_names_of_classes_are_those_of_ours_and_come_back():
    assert HEADS.keys() <= ARCHITECTURES.keys()
    for family in FAMILIES:
        for theirs in family.beginnings.values():
            assert family.endings.keys() <= ARCHITECTURES.keys()
            assert family.pooled is not None and set(family.pooled) <= family.endings.keys()
            assert {OUR_CLASSES[theirs + end] for end in family.endings.values()} <= family.endings.keys()


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
    for name, value in (("family_for", lambda _: Divided()), ("family_of", lambda _: "bert")):
        monkeypatch.setattr(huggingface, name, value)
    weights = scramble(BertForMaskedLM(config)).state_dict()
    theirs = huggingface.to_huggingface(weights, config)
    up = weights["bert.encoder.layers.1.feed_forward.up.weight"]
    fused = "bert.encoder.layer.1.intermediate.weight"
    assert torch.equal(theirs[fused], torch.cat((up[37:], up[:37])))
    again = huggingface.from_huggingface(theirs, config)
    assert again.keys() == weights.keys() and torch.equal(again["bert.encoder.layers.1.feed_forward.up.weight"], up)
    theirs[fused] = theirs[fused][:-1]
    with pytest.raises(ModelError, match=r"intermediate.weight: found shape \(73, 32\), expected \(74, 32\)"):
        huggingface.from_huggingface(theirs, config)


def test_a_field_that_no_family_says_makes_a_variant():
    assert family_of(BertConfig()) == "bert" and family_of(BertConfig(norm_position="pre")) is None
    with pytest.raises(ModelError, match="no counterpart"):
        family_for(BertConfig(normalization="rms_norm"))
