"""Maximal update parametrization: against its published form with multipliers, and activations over width and depth."""

import copy
import dataclasses
import math

import pytest
import torch

from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.optimizers import build_optimizer, parameter_groups
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.flops import encoder_weights
from cloze.model.initialization import init_weights
from cloze.model.parametrization import describe

BASE = BertConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    parametrization="mup",
    base_hidden_size=32,
    base_num_layers=2,
    # At the base's width the size of vectors is kept, so that the encoder counts from the first step on.
    initializer_range=0.18,
)
STEPS = 10


def larger(width: int, depth: int, **changes) -> BertConfig:
    return dataclasses.replace(
        BASE,
        hidden_size=32 * width,
        num_attention_heads=2 * width,
        intermediate_size=64 * width,
        num_hidden_layers=2 * depth,
        **changes,
    )


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(5, 96, (2, 8, 16), generator=generator)
    return {
        "input_ids": ids,
        "labels": labels,
        "next_sentence_label": torch.randint(0, 2, (8,), generator=generator),
    }


def train(model: BertForPreTraining, optimizer: torch.optim.Optimizer, rate: float, steps: int) -> None:
    inputs = batch()
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()


def test_at_the_base_shape_it_is_the_standard_one():
    standard = dataclasses.replace(BASE, parametrization="standard")
    models = [BertForPreTraining(config) for config in (BASE, standard)]
    for model in models:
        init_weights(model, 3)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    for name in ("adamw", "lamb", "muon", "stable_adamw"):
        ours, theirs = (parameter_groups(model, OptimizerConfig(name=name)) for model in models)
        sizes = [[{**group, "params": len(group["params"])} for group in groups] for groups in (ours, theirs)]
        assert sizes[0] == sizes[1]


def test_a_step_is_that_of_the_published_form_with_multipliers():
    """Table 8 of arXiv 2203.03466 and table 1 of arXiv 2505.01618: activations are multiplied, weights are not."""
    m, n, rate = 4, 3, 2e-3
    ours = BertForPreTraining(larger(m, n, norm_position="pre"))
    init_weights(ours, 0)
    theirs = copy.deepcopy(ours)
    ends = ("attention.output.weight", "feed_forward.down.weight")
    rates = {}
    for name, module in theirs.named_modules():
        if name.endswith(("attention.output", "feed_forward.down")):
            module.register_forward_hook(lambda module, inputs, output: output / n)
        elif name in ("masked_lm.norm", "next_sentence"):
            module.register_forward_hook(lambda module, inputs, output: output / m)
    scaled = {  # what takes a multiplier in here: its weights are those of the published form times this
        "masked_lm.norm.weight": 1 / m,
        "masked_lm.norm.bias": 1 / m,
        "next_sentence.classifier.weight": 1 / m,
        "next_sentence.classifier.bias": 1 / m,
    }
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith((*ends, "attention.output.bias", "feed_forward.down.bias")):
                scaled[name] = 1 / n
            parameter.div_(scaled.get(name, 1.0))
            deviation = parameter.std().item()
            layers = "encoder.layers" in name
            hidden = parameter.dim() == 2 and (layers or name.endswith("dense.weight"))
            rates[name] = rate / m if hidden else rate
            if parameter.numel() > 1000 and "word" not in name:  # which has rows of padding
                assert deviation == pytest.approx(0.18 / math.sqrt(m) if hidden else 0.18, rel=0.05), name
            if name.endswith("norm.weight"):
                assert (parameter == 1).all()
    # The classifier's bias is not multiplied in ours, as that of the vocabulary is not.
    rates["next_sentence.classifier.bias"] = rate * m
    config = OptimizerConfig(eps=1e-30, weight_decay=0.1, betas=[0.9, 0.99])
    train(ours, build_optimizer(ours, config, rate), rate, 5)
    groups = [
        {
            "params": [each],
            "lr_scale": rates[name] / rate,
            "weight_decay": 0.1 * rate / rates[name] if each.dim() == 2 else 0.0,
        }
        for name, each in theirs.named_parameters()
    ]
    train(theirs, torch.optim.AdamW(groups, eps=1e-30, betas=(0.9, 0.99)), rate, 5)
    for (name, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        kept = slice(None)
        if name.endswith("qkv.bias"):  # that of keys has no gradient but rounding, of which Adam makes whole steps
            kept = [place for place in range(len(mine)) if place // ours.config.hidden_size != 1]
        assert torch.allclose(mine[kept], (reference * scaled.get(name, 1.0))[kept], rtol=2e-3, atol=2e-5), name


def sizes(config: BertConfig, optimizer: OptimizerConfig, rate: float) -> dict[str, float]:
    """Root mean squares of what the last layer and the head compute after a few steps."""
    model = BertForPreTraining(config)
    init_weights(model, 0)
    train(model, build_optimizer(model, optimizer, rate), rate, STEPS)
    last = f"layers.{config.num_hidden_layers - 1}."
    places = (f"{last}attention.qkv", f"{last}feed_forward.up", f"{last}feed_forward.down", "masked_lm.dense")
    found = {}

    def note(name, output):
        found[name] = output.square().mean().sqrt().item()

    for name, module in model.named_modules():
        if place := next((place for place in places if name.endswith(place)), None):
            kind = place.removeprefix(last)
            module.register_forward_hook(lambda module, inputs, output, kind=kind: note(kind, output.detach()))
    with torch.no_grad():
        model(**batch())
    return found


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (OptimizerConfig(), 3e-3),
        (OptimizerConfig(name="muon"), 2e-2),
        (OptimizerConfig(name="lamb"), 1e-2),
        (OptimizerConfig(name="stable_adamw"), 3e-3),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_activations_keep_their_size_over_the_width_and_grow_without_it(optimizer, rate):
    """The coordinate check of arXiv 2203.03466 (appendix D.1)."""
    growth = {}
    for parametrization in ("mup", "standard"):
        narrow, wide = (sizes(larger(width, 1, parametrization=parametrization), optimizer, rate) for width in (1, 8))
        growth[parametrization] = {name: wide[name] / narrow[name] for name in wide}
    assert all(0.6 < ratio < 1.6 for ratio in growth["mup"].values()), growth
    assert min(growth["standard"].values()) > 2, growth


def test_what_a_layer_adds_falls_with_the_depth():
    shallow, deep = (sizes(larger(1, depth), OptimizerConfig(), 3e-3) for depth in (1, 4))
    for name, size in shallow.items():
        expected = size / 4 if name == "feed_forward.down" else size
        assert deep[name] == pytest.approx(expected, rel=0.25), name


@pytest.mark.parametrize(
    ("optimizer", "rates", "decays"),
    [
        (OptimizerConfig(), (1 / 4, 1 / 12), (4, 12)),
        (OptimizerConfig(name="stable_adamw"), (1 / 4, 1 / 12), (4, 12)),
        (OptimizerConfig(name="muon"), (1 / 2, 1 / 6), (2, 6)),
        (OptimizerConfig(name="muon", matrix_decay="hyperball"), (1, 1), (1, 1)),
        (OptimizerConfig(name="lamb"), (1 / 2, 1 / 2), (2, 6)),
    ],
    ids=["adamw", "stable_adamw", "muon", "hyperball", "lamb"],
)
def test_each_optimizers_rates_follow_width_and_depth(optimizer, rates, decays):
    model = BertForPreTraining(larger(4, 3))
    groups = {id(each): group for group in parameter_groups(model, optimizer) for each in group["params"]}
    layer = model.bert.encoder.layers[0]
    for module, rate, decay in zip((layer.attention.qkv, layer.feed_forward.down), rates, decays, strict=True):
        group = groups[id(module.weight)]
        assert group["lr_scale"] == pytest.approx(rate)
        assert group["weight_decay"] == pytest.approx(0.01 * decay)  # a step shrinks a weight by as much as in the base
    assert groups[id(model.bert.embeddings.word.weight)]["lr_scale"] == 1
    assert groups[id(layer.feed_forward.down.bias)]["lr_scale"] == pytest.approx(1 / 3)
    assert groups[id(layer.attention_norm.weight)]["lr_scale"] == pytest.approx(1 / 3)
    assert groups[id(layer.attention.qkv.weight)].get("eps", 1e-6) == pytest.approx(1e-6 / 12)
    assert groups[id(model.masked_lm.norm.bias)]["lr_scale"] == pytest.approx(1 / 4)
    relative = optimizer.name == "lamb"
    assert groups[id(model.masked_lm.norm.weight)]["lr_scale"] == pytest.approx(1 if relative else 1 / 4)
    names = [group["name"] for group in parameter_groups(model, optimizer)]
    assert len(set(names)) == len(names)


def test_it_is_described_with_its_factors():
    said = describe(larger(4, 2))
    assert (
        said.startswith("mup, 4 x the width of 32, 2 x the depth of 2: ") and "scores of the vocabulary x 0.25" in said
    )


def test_the_automatic_rate_is_that_of_the_base():
    assert encoder_weights(larger(4, 3).base_shape) == encoder_weights(BASE)
    grouped = larger(4, 3, num_key_value_heads=2, num_layer_groups=3)
    assert grouped.base_shape.num_hidden_layers == 2 and grouped.base_shape.head_size == BASE.head_size
    standard = larger(4, 3, parametrization="standard")
    assert standard.base_shape is standard
