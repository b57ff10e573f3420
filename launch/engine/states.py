"""Optimizer states in checkpoints, by the names of the parameters.

DeepSpeed's file of the model holds the states of an optimizer that every rank has whole. Where the work is divided
(division.py) each rank writes its own parameters' states into a file of its own, and the model's file says by OWNERS
which rank has which. Either is read by any number of ranks, divided or not: nothing is converted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cloze.launch.engine.division import Division
from cloze.launch.engine.files import Content, Read, Submit
from cloze.launch.engine.optimizers.groups import Group

OWNERS = "optimizer_owners"
_STATES = "states"

States = dict[str, dict[str, Tensor]]
"""States of parameters by their names, each by the optimizer's name of it."""


def optimizer_file(rank: int) -> str:
    """Name of the file with the states of the parameters that a rank updates."""
    return f"optimizer-{rank:05d}.pt"


def submit_states(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], division: Division, folder: Path, submit: Submit
) -> None:
    """Hand over this rank's file of states."""
    states = {names[each]: state for each, state in optimizer.state.items()}
    submit({_STATES: states}, folder / optimizer_file(division.rank))


def load_states(
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    content: Content,
    groups: list[Group],
    folder: Path,
    read: Read,
) -> None:
    """Give an optimizer the states of a checkpoint, where either or both of them are divided; the groups keep their
    constants.

    Args:
        optimizer: over this rank's parameters.
        names: of all trained parameters.
        content: of DeepSpeed's file of the model.
        groups: the optimizer's groups over all trained parameters.
        read: reads a file, and refuses what is neither a tensor nor a plain value.
    """
    own = [names[each] for group in optimizer.param_groups for each in group["params"]]
    if OWNERS in content:
        owners = content[OWNERS]
        files = [read(str(folder / optimizer_file(rank))) for rank in sorted({owners[name] for name in own})]
        states = {name: state for file in files for name, state in file[_STATES].items()}
    else:
        saved = content["optimizer"]
        places = [place for group in saved["param_groups"] for place in group["params"]]
        whole = [names[each] for group in groups for each in group["params"]]
        states = {
            name: saved["state"][place] for name, place in zip(whole, places, strict=True) if place in saved["state"]
        }
    constants = optimizer.state_dict()["param_groups"]
    # By torch's own loader, which puts each state where, and in the format in which, the optimizer wants it.
    optimizer.load_state_dict(
        {"state": {place: states[name] for place, name in enumerate(own) if name in states}, "param_groups": constants}
    )
