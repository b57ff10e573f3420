"""Optimizer states of one form of checkpoint in the other, without ranks: by names, whoever has which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cloze.launch.engine.content import OtherContent
from cloze.launch.engine.states import OWNERS, STATELESS, load_states, optimizer_file


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))


def _groups(model, own=None):
    """Matrices, and biases with another decay; only those named."""
    named = [(name, each) for name, each in model.named_parameters() if own is None or name in own]
    return [
        {"params": [each for _, each in named if each.dim() == dim], "weight_decay": 0.1 * dim, "lr": 1e-3}
        for dim in (2, 1)
    ]


def _stepped(model) -> tuple[torch.optim.Optimizer, dict]:
    optimizer = torch.optim.AdamW(_groups(model))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    names = {each: name for name, each in model.named_parameters()}
    return optimizer, {names[each]: state for each, state in optimizer.state.items()}


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("own", [None, {"0.weight", "1.bias"}, {"1.weight"}, set()], ids=["all", "two", "one", "none"])
def test_states_go_to_the_parameters_of_their_names(model, divided, own):
    """And no more files are read than hold them; constants of the groups stay as they are."""
    optimizer, expected = _stepped(model)
    owners = {"0.weight": 2, "0.bias": 0, "1.weight": 0, "1.bias": 2}
    files = {
        optimizer_file(rank): {"states": {name: expected[name] for name, owner in owners.items() if owner == rank}}
        for rank in (0, 2)
    }
    content = {"optimizer": None, OWNERS: owners} if divided else {"optimizer": optimizer.state_dict()}
    other, read = torch.optim.AdamW(_groups(model, own)), []
    for group in other.param_groups:
        group["lr"] = 7.0

    def read_file(path: str) -> dict:
        read.append(Path(path).name)
        return files[Path(path).name]

    names = {each: name for name, each in model.named_parameters()}
    load_states(other, model, _groups(model), content, Path("folder"), read_file, 1)
    whole, own = own is None and not divided, set(owners) if own is None else own
    assert {names[each] for each in other.state} == own
    for each, state in other.state.items():
        assert state.keys() == expected[names[each]].keys()
        assert all(torch.equal(value, expected[names[each]][key]) for key, value in state.items())
    # torch takes them from the whole optimizer of a checkpoint; the engine then gives back its own.
    assert [group["lr"] for group in other.param_groups] == ([1e-3, 1e-3] if whole else [7.0, 7.0])
    assert read == (sorted({optimizer_file(owners[name]) for name in own}) if divided else [])


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("lost", [["0.bias"], ["0.weight", "0.bias", "1.weight", "1.bias"]])
def test_states_that_are_gone_are_missed(model, divided, lost):
    """A parameter that never had a gradient has none, as the file says; of a file that does not say so, an earlier
    version's, some must be there."""
    optimizer, states = _stepped(model)
    by_parameter = {each: name for name, each in model.named_parameters()}
    names = [by_parameter[each] for group in optimizer.param_groups for each in group["params"]]

    def load(gone: list[str], stateless: dict, steps: int = 1) -> torch.optim.Optimizer:
        kept = {name: state for name, state in states.items() if name not in gone}
        whole = optimizer.state_dict()
        whole["state"] = {names.index(name): state for name, state in kept.items()}
        content = {"optimizer": None, OWNERS: dict.fromkeys(names, 0)} if divided else {"optimizer": whole} | stateless
        other = torch.optim.AdamW(_groups(model))
        load_states(
            other, model, _groups(model), content, Path("folder"), lambda _: {"states": kept} | stateless, steps
        )
        return other

    assert not load(names, {STATELESS: []}, steps=0).state, "before the first step"
    assert len(load(["0.bias"], {STATELESS: ["0.bias"]}).state) == 3
    assert len(load(["0.bias"], {}).state) == 3, "of an earlier version"
    with pytest.raises(OtherContent, match=f"no states of {lost[0]}"):
        load(lost, {STATELESS: []})
    with pytest.raises(OtherContent, match="no states of 0.weight"):
        load(names, {})
