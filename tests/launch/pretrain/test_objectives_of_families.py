"""Every objective trains every family of encoders; what an objective cannot train it refuses by name."""

import dataclasses

import pytest
import torch

from cloze.launch.config import OptimizerConfig, PretrainConfig
from cloze.launch.engine.optimizers import build_optimizer
from cloze.launch.pretrain.first_model import build_model
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.model.families import BY_TYPE, family_of
from cloze.model.tasks import BertForMaskedLM
from cloze.pipeline.errors import UserError
from tests.model.model_batches import batch, concatenate, scramble
from tests.model.tiny_families import tiny
from tests.synthetic import make_shards
from tests.tables import assert_same_names

# Each objective with another optimizer.
OPTIMIZERS = {
    "masked": "muon",
    "span_boundary": "stable_adamw",
    "replaced_tokens": "adamw",
    "distillation": "lamb",
}
REFUSED = {("replaced_tokens", "eurobert"): "model.mlm_head: found linear with objective replaced_tokens, expected"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


def test_every_objective_is_tried():
    assert_same_names(OBJECTIVES, OPTIMIZERS, "OPTIMIZERS in this file, the optimizer that trains an objective")


@pytest.mark.parametrize("kind", BY_TYPE)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_weight_learns(name, kind, data, tmp_path):
    shape, options = tiny(kind), {}
    if (name, kind) == ("replaced_tokens", "bert"):
        shape = dataclasses.replace(shape, embedding_size=shape.hidden_size, pooler=False)
    if name == "distillation":
        if shape.pad_token_id:  # positions begin after it, so the tokenizer has to know it
            data = make_shards(tmp_path / "data", pad_id=shape.pad_token_id)
        scramble(BertForMaskedLM(shape)).save(tmp_path / "teacher", data / "tokenizer")
        options = {"teacher": str(tmp_path / "teacher")}
    config = PretrainConfig(str(data), "run", model=shape, objective=name, objective_options=options)
    if said := REFUSED.get((name, kind)):
        with pytest.raises(UserError, match=said):
            make_objective(config)
        return
    objective = make_objective(config)
    model = build_model(config, objective).train()
    assert family_of(model.config) == kind or (name, kind) == ("replaced_tokens", "bert")
    given = concatenate(batch(shape, (30, 17, 9)))
    if not shape.type_vocab_size:
        del given["token_type_ids"]
    if objective.STEP_SEED:
        given["step_seed"] = 0
    optimizer = build_optimizer(model, OptimizerConfig(name=OPTIMIZERS[name]), 1e-3)
    before = {key: weight.clone() for key, weight in model.named_parameters()}
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        output, divisors = model(**given), objective.divisors(given)
        terms = objective.terms(output, given).items()
        loss = sum(objective.weights.get(term, 1.0) * each.losses.sum() / divisors[term] for term, each in terms)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0] or OPTIMIZERS[name] == "lamb"  # whose first steps are as wide as the weights
    still = [key for key, weight in model.named_parameters() if torch.equal(before[key], weight)]
    assert not still and all(weight.isfinite().all() for weight in model.parameters())
