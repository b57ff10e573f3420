"""Optimizer states in checkpoints, by the names of the parameters.

DeepSpeed's file of the model holds the states of an optimizer that every rank has whole. Where the work is divided
(division.py) each rank writes its own parameters' states into a file of its own, and the model's file says by OWNERS
which rank has which. Either is read by any number of ranks, divided or not: nothing is converted.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cloze.launch.engine.checkpoint_files import Content, Read, Submit
from cloze.launch.engine.content import OtherContent, check_optimizer, check_state, count_in, fields_in, takes_numbers
from cloze.launch.engine.division import Division
from cloze.launch.engine.optimizers.groups import Group

OWNERS = "optimizer_owners"
_STATES = "states"  # entry of a file of states: those of each parameter by its name
# Entry of the file with the states: the parameters that had none yet, since they never had a gradient. All others must
# have some, or the run would go on with other moments, without a word.
STATELESS = "parameters_without_states"


def optimizer_file(rank: int) -> str:
    """Name of the file with the states of the parameters that a rank updates."""
    return f"optimizer-{rank:05d}.pt"


def submitting_model(
    submit: Submit, optimizer: torch.optim.Optimizer, model: nn.Module, division: Division | None
) -> Submit:
    """A `submit` for DeepSpeed's file of the model. Of a divided optimizer, of which DeepSpeed sees one rank's part
    alone, it leaves out the states, and names the rank that has those of each parameter.
    """
    if division:
        return lambda content, path: submit(content | {"optimizer": None, OWNERS: division.owners}, path)
    names = _names_of(model)
    return lambda content, path: submit(content | {STATELESS: _stateless(optimizer, names)}, path)


def submit_states(optimizer: torch.optim.Optimizer, division: Division, folder: Path, submit: Submit) -> None:
    """Hand over this rank's file of states; the folder is there."""
    states = {division.names[each]: optimizer.state[each] for each in _own(optimizer) if each in optimizer.state}
    content = {_STATES: states, STATELESS: _stateless(optimizer, division.names)}
    submit(content, folder / optimizer_file(division.rank))


def _own(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _stateless(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    return [names[each] for each in _own(optimizer) if not optimizer.state.get(each)]


def _check_stateless(content: Content, names: Sequence[str], missing: Collection[str], steps: int) -> None:
    """Raise OtherContent if a file that names the parameters without states lacks those of another. A file of an
    earlier version names none: there some must have states.

    Args:
        names: of the parameters whose states belong there.
        missing: of those that have none.
        steps: that the optimizer has made; before the first there are no states.
    """
    known = content.get(STATELESS)
    if not isinstance(known, list):
        known = missing if len(missing) < len(names) else []
    if steps and (lost := [name for name in missing if name not in known]):
        raise OtherContent(f"the optimizer has no states of {lost[0]}")


def load_states(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    groups: list[Group],
    content: Content,
    folder: Path,
    read: Read,
    optimizer_steps: int,
) -> None:
    """Give an optimizer the states of a checkpoint, whichever of them is divided.

    Args:
        optimizer: over this rank's parameters of the model.
        groups: the optimizer's groups over all trained parameters.
        content: of DeepSpeed's file of the model.
        read: reads a file, and refuses what is neither a tensor nor a plain value.
        optimizer_steps: that the optimizer has made.

    Raises:
        OtherContent: the states are those of another optimizer, or of none.
    """
    own, names = _own(optimizer), _names_of(model)
    if OWNERS in content:
        states = _divided_states(optimizer, names, groups, content, folder, read, optimizer_steps)
    else:
        saved = _whole_states(optimizer, names, groups, content, optimizer_steps)
        trained = _trained(groups)
        if len(own) == len(trained):
            optimizer.load_state_dict(saved)  # with its groups, in which DeepSpeed's FusedAdam counts steps
            return
        states = {names[each]: saved["state"][place] for place, each in enumerate(trained) if place in saved["state"]}
    own_states = {place: states[names[each]] for place, each in enumerate(own) if names[each] in states}
    # torch's own loader moves each state to the device, and to the format, that the optimizer needs.
    optimizer.load_state_dict({"state": own_states, "param_groups": optimizer.state_dict()["param_groups"]})


def _whole_states(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    groups: list[Group],
    content: Content,
    optimizer_steps: int,
) -> dict[str, Any]:
    """The `state_dict` of an optimizer over all trained parameters, checked."""
    saved = fields_in(content.get("optimizer"), "optimizer")
    trained = _trained(groups)
    whole = len(_own(optimizer)) == len(trained)
    expected = optimizer.state_dict()["param_groups"] if whole else _numbered(groups)
    check_optimizer(saved, "optimizer", expected, trained, steps=optimizer_steps, number=takes_numbers(optimizer))
    missing = [names[each] for place, each in enumerate(trained) if not saved["state"].get(place)]
    _check_stateless(content, [names[each] for each in trained], missing, optimizer_steps)
    return saved


def _divided_states(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    groups: list[Group],
    content: Content,
    folder: Path,
    read: Read,
    optimizer_steps: int,
) -> dict[str, Any]:
    """The states, by names, in the files of all ranks that had some of this rank's parameters; those of this rank's
    parameters are checked.
    """
    own, number = _own(optimizer), takes_numbers(optimizer)
    owners = fields_in(content[OWNERS], OWNERS, (names[each] for each in own))
    ranks = sorted({count_in(owners[names[each]], f"{OWNERS}.{names[each]}") for each in own})
    files = [read(str(folder / optimizer_file(rank))) for rank in ranks]
    states = {
        name: state
        for rank, file in zip(ranks, files, strict=True)
        for name, state in fields_in(file.get(_STATES), f"{_STATES} of process {rank}").items()
    }
    muon = {each: group.get("muon", False) for group in groups for each in group["params"]}
    for each in own:
        state, where = states.get(names[each], {}), f"{_STATES}.{names[each]}"
        check_state(state, where, each, muon=muon[each], steps=optimizer_steps, number=number)
    for rank, file in zip(ranks, files, strict=True):
        its = [names[each] for each in own if owners[names[each]] == rank]
        _check_stateless(file, its, [name for name in its if not states.get(name)], optimizer_steps)
    return states


def _trained(groups: list[Group]) -> list[nn.Parameter]:
    return [each for group in groups for each in group["params"]]


def _numbered(groups: list[Group]) -> list[Group]:
    """The groups as `Optimizer.state_dict` has them: with the places of the parameters instead of these."""
    places = count()
    return [group | {"params": [next(places) for _ in group["params"]]} for group in groups]
