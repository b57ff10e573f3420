"""Optimizer states in checkpoints, by the names of the parameters.

DeepSpeed's file of the model holds the states of an optimizer that every rank has whole. Where the work is divided
(division.py) each rank writes its own parameters' states into a file of its own, and the model's file says by OWNERS
which rank has which. Either is read by any number of ranks, divided or not: nothing is converted.
"""

from pathlib import Path

import torch
from torch import nn

from cloze.launch.engine.checkpoint_files import Content, Read, Submit
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
) -> None:
    """Give an optimizer the states of a checkpoint, whichever of them is divided.

    Args:
        optimizer: over this rank's parameters of the model.
        groups: the optimizer's groups over all trained parameters.
        content: of DeepSpeed's file of the model.
        read: reads a file, and refuses what is neither a tensor nor a plain value.
    """
    own = [each for group in optimizer.param_groups for each in group["params"]]
    trained = [each for group in groups for each in group["params"]]
    if OWNERS not in content and len(own) == len(trained):
        optimizer.load_state_dict(content["optimizer"])
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    if OWNERS in content:
        ranks = sorted({content[OWNERS][names[each]] for each in own})
        files = [read(str(folder / optimizer_file(rank))) for rank in ranks]
        states = {name: state for file in files for name, state in file[_STATES].items()}
    else:
        saved = content["optimizer"]
        places = [place for group in saved["param_groups"] for place in group["params"]]
        pairs = zip(trained, places, strict=True)
        states = {names[each]: saved["state"][place] for each, place in pairs if place in saved["state"]}
    own_states = {place: states[names[each]] for place, each in enumerate(own) if names[each] in states}
    # torch's own loader moves each state to the device, and to the format, that the optimizer needs.
    optimizer.load_state_dict({"state": own_states, "param_groups": optimizer.state_dict()["param_groups"]})
