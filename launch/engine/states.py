"""Optimizer states in checkpoints, by the names of the parameters.

DeepSpeed's file of the model holds the states of an optimizer that every rank has whole. Where the work is divided
(division.py) each rank writes its own parameters' states into a file of its own, and the model's file says by OWNERS
which rank has which. Either is read by any number of ranks, divided or not: nothing is converted.
"""

from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cloze.launch.engine.checkpoint_files import Content, Read, Submit
from cloze.launch.engine.content import check_optimizer, check_state, count_in, fields_in, takes_numbers
from cloze.launch.engine.division import Division
from cloze.launch.engine.optimizers.groups import Group

OWNERS = "optimizer_owners"
_STATES = "states"  # entry of a file of states: those of each parameter by its name


def optimizer_file(rank: int) -> str:
    """Name of the file with the states of the parameters that a rank updates."""
    return f"optimizer-{rank:05d}.pt"


def submitting_model(submit: Submit, division: Division) -> Submit:
    """A `submit` for DeepSpeed's file of the model: it leaves out the optimizer, of which DeepSpeed sees one rank's
    part alone, and names the rank that has the states of each parameter.
    """
    return lambda content, path: submit(content | {"optimizer": None, OWNERS: division.owners}, path)


def submit_states(optimizer: torch.optim.Optimizer, division: Division, folder: Path, submit: Submit) -> None:
    """Hand over this rank's file of states; the folder is there."""
    own = [each for group in optimizer.param_groups for each in group["params"]]
    states = {division.names[each]: optimizer.state[each] for each in own if each in optimizer.state}
    submit({_STATES: states}, folder / optimizer_file(division.rank))


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
    own = [each for group in optimizer.param_groups for each in group["params"]]
    trained = [each for group in groups for each in group["params"]]
    number = takes_numbers(optimizer)
    if OWNERS not in content:
        saved: Any = content.get("optimizer")
        whole = len(own) == len(trained)
        expected = optimizer.state_dict()["param_groups"] if whole else _numbered(groups)
        check_optimizer(saved, "optimizer", expected, trained, steps=optimizer_steps, number=number)
        if whole:
            optimizer.load_state_dict(saved)
            return
    names = {parameter: name for name, parameter in model.named_parameters()}
    if OWNERS in content:
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
    else:
        states = {names[each]: saved["state"][place] for place, each in enumerate(trained) if place in saved["state"]}
    own_states = {place: states[names[each]] for place, each in enumerate(own) if names[each] in states}
    # torch's own loader moves each state to the device, and to the format, that the optimizer needs.
    optimizer.load_state_dict({"state": own_states, "param_groups": optimizer.state_dict()["param_groups"]})


def _numbered(groups: list[Group]) -> list[Group]:
    """The groups as `Optimizer.state_dict` has them: with the places of the parameters instead of these."""
    places = count()
    return [group | {"params": [next(places) for _ in group["params"]]} for group in groups]
