"""Which parameters decay."""

import pytest
import torch

from launch.config import OptimizerConfig
from launch.optimizers import build_optimizer, parameter_groups
from model.bert import BertForPreTraining
from model.config import BertConfig


def model(**changes) -> BertForPreTraining:
    return BertForPreTraining(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                         intermediate_size=32, max_position_embeddings=8, **changes))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_every_parameter_is_in_exactly_one_group_and_only_matrices_decay(tied, decay_embeddings):
    bert = model(tie_word_embeddings=tied)
    decay, rest = parameter_groups(bert, OptimizerConfig(decay_embeddings=decay_embeddings))
    ids = [id(p) for group in (decay, rest) for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in bert.parameters()}
    assert decay["weight_decay"] == 0.01 and rest["weight_decay"] == 0.0
    decaying = {id(p) for p in decay["params"]}
    for name, parameter in bert.named_parameters():
        if name.endswith("bias") or "norm" in name:
            assert id(parameter) not in decaying, name
        elif ".embeddings." in name:
            assert (id(parameter) in decaying) == decay_embeddings, name
        else:
            assert id(parameter) in decaying, name


def test_a_frozen_parameter_is_in_no_group():
    bert = model()
    bert.bert.embeddings.position.weight.requires_grad_(False)
    ids = {id(p) for group in parameter_groups(bert, OptimizerConfig()) for p in group["params"]}
    assert id(bert.bert.embeddings.position.weight) not in ids


def test_the_optimizer_gets_the_configured_constants():
    optimizer = build_optimizer(model(), OptimizerConfig(betas=[0.9, 0.98], eps=1e-5, weight_decay=0.3), 0.5)
    assert isinstance(optimizer, torch.optim.AdamW)
    decay, rest = optimizer.param_groups
    assert (decay["lr"], decay["betas"], decay["eps"]) == (0.5, (0.9, 0.98), 1e-5)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
