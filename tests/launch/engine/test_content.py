"""What a checkpoint's content must be like: whatever is let through can be loaded, and makes a step."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.checkpoint_files import _check_scaler
from cloze.launch.engine.content import (
    OtherContent,
    check_groups,
    check_names,
    check_optimizer,
    check_tensor,
    count_in,
    fields_in,
    has_values,
    list_in,
    of_file,
    version_in,
)
from cloze.launch.engine.optimizers import build_optimizer
from cloze.launch.engine.optimizers.groups import parameter_groups
from cloze.launch.engine.states import OWNERS, load_states, optimizer_file
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from tests.hostile_states import OPTIMIZERS, TENSORS, change

STEPS = 2
SHAPE = BertConfig(
    vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, type_vocab_size=1
)


# What may be another step up to this one, or moments in another precision and of another sign.
HARMLESS = {
    "step": ("double", "bf16", "without dimension", "whole numbers", "expanded"),
    "exp_avg_sq": ("double", "bf16"),
}


def stepped(name: str, steps: int = STEPS) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = BertForPreTraining(SHAPE)
    optimizer = build_optimizer(model, OptimizerConfig(name=name), 1e-3)
    for _ in range(steps):
        make_step(model, optimizer)
    return model, optimizer


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()


@pytest.fixture(scope="module", params=OPTIMIZERS)
def whole(request) -> tuple[str, dict]:
    return request.param, stepped(request.param)[1].state_dict()


def check(content: dict, optimizer: torch.optim.Optimizer) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    check_optimizer(content, "optimizer", optimizer.state_dict()["param_groups"], parameters, steps=STEPS)


def test_states_of_a_run_are_let_through(whole):
    """Those of a parameter that has not begun to learn as well, and those in another precision."""
    name, saved = whole
    content, (_, optimizer) = copy.deepcopy(saved), stepped(name, 0)
    content["state"][0] = {}
    del content["state"][1]
    content["state"][2] = {
        key: value if key == "step" else value.bfloat16() for key, value in content["state"][2].items()
    }
    check(content, optimizer)
    with pytest.raises(OtherContent, match="optimizer.state has none of parameter 0"):
        own = optimizer.state_dict()["param_groups"]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        check_optimizer(content, "optimizer", own, parameters, steps=STEPS, whole=True)


@pytest.mark.parametrize("how", TENSORS)
def test_no_tensor_of_another_kind_is_let_through(whole, how):
    """Of each of the states of one parameter: its shape, its format, its values."""
    name, saved = whole
    for key, value in saved["state"][0].items():
        content, (model, optimizer) = copy.deepcopy(saved), stepped(name, 0)
        try:
            content["state"][0][key] = changed = TENSORS[how](value)
        except (RuntimeError, IndexError, NotImplementedError):  # there is no such tensor
            continue
        same = how in HARMLESS.get(key, ("double", "bf16", "negative")) or (
            isinstance(changed, torch.Tensor)
            and has_values(changed)
            and changed.dtype == value.dtype
            and torch.equal(changed, value)
        )
        if same:
            check(content, optimizer)
            optimizer.load_state_dict(content)
            make_step(model, optimizer)
        else:
            with pytest.raises(OtherContent, match=rf"optimizer\.state\.0\.{key}"):
                check(content, optimizer)


def test_what_is_let_through_makes_a_step(whole):
    """Of 300 changes, anywhere in it: refused, or harmless."""
    name, saved = whole
    rng, refused = random.Random(0), 0
    model, optimizer = stepped(name, 0)
    for _ in range(300):
        content = copy.deepcopy(saved)
        try:
            what = change(content, rng)
        except (RuntimeError, IndexError, NotImplementedError, AttributeError, TypeError):  # there is no such tensor
            continue
        groups = [dict(group) for group in optimizer.param_groups]
        try:
            check(content, optimizer)
        except OtherContent as error:
            assert "\n" not in str(error), what
            refused += 1
            continue
        optimizer.load_state_dict(content)
        for group, own in zip(optimizer.param_groups, groups, strict=True):  # as the engine does
            group.update({key: value for key, value in own.items() if key != "params"})
        make_step(model, optimizer)
        assert all(parameter.isfinite().all() for parameter in model.parameters()), what
        model, optimizer = stepped(name, 0)  # for the next one, as new
    assert refused > 150


@pytest.mark.parametrize(
    ("owners", "file", "found"),
    [
        ({}, {}, f"{OWNERS} has no"),
        ("all", {}, "states of process 0 is None"),
        ("all", {"states": []}, r"states of process 0 is \[\]"),
        ("all", {"states": {"bert.pooler.dense.bias": {"step": torch.ones(())}}}, "pooler.dense.bias lacks exp_avg"),
        (True, {"states": {}}, r"bert.* is True, expected a whole number"),
    ],
)
def test_divided_states_of_another_form_are_refused(owners, file, found):
    model, optimizer = stepped("lamb", 0)
    names = [name for name, _ in model.named_parameters()]
    owners = dict.fromkeys(names, 0) if owners == "all" else dict.fromkeys(names, True) if owners else owners
    groups = parameter_groups(model, OptimizerConfig(name="lamb"))

    def read(path: str) -> dict:
        assert path.endswith(optimizer_file(0))
        return file

    with pytest.raises(OtherContent, match=found):
        load_states(optimizer, model, groups, {OWNERS: owners}, Path("x"), read, STEPS)


def test_a_loss_scaler_is_looked_at():
    def scaler(**changes):
        made = DynamicLossScaler(4.0, 100, 1.0, 2, False)
        vars(made).update(changes)
        return made

    _check_scaler(scaler(cur_scale=8.0), scaler())
    _check_scaler(LossScaler(scale=1.0), scaler())  # another precision's
    for wrong in (3, {}, scaler(cur_scale=0.0), scaler(cur_scale=float("nan")), scaler(cur_iter="x"), scaler(more=1)):
        with pytest.raises(OtherContent, match="loss_scaler"):
            _check_scaler(wrong, scaler())


def test_messages_name_the_place():
    for wrong, found in (
        (lambda: fields_in([1], "a.b"), r"^a.b is \[1\], expected values by name$"),
        (lambda: fields_in({}, "a", ("x",)), "^a has no x$"),
        (lambda: list_in({}, "a", 2), "^a is values by name, expected a list of 2$"),
        (lambda: count_in(True, "a"), "^a is True, expected a whole number from 0 on$"),
        (lambda: count_in(8, "a", 4, 4), "^a is 8, expected 4$"),
        (lambda: count_in(8, "a", 0, 7), "^a is 8, expected a whole number from 0 to 7$"),
        (lambda: check_names(["x"], "a", ["x", "y"]), "^a lacks y$"),
        (lambda: check_names(["x", "y"], "a", ["x"]), "^a has y$"),
        (lambda: check_tensor(torch.ones(2), "a", [3], torch.float32), r"^a is a tensor of float32 of shape \(2,\)"),
        (lambda: version_in("1\n", "a"), "^a is '1.n', expected a version$"),
        (lambda: check_groups([{}], "a", [{"params": [0]}]), "^a.0 has no params$"),
    ):
        with pytest.raises(OtherContent, match=found):
            wrong()
    with pytest.raises(OtherContent, match="^file.pt: a is None"), of_file("/some/file.pt"):
        fields_in(None, "a")
    assert version_in("0.19.8+cu12", "a")
