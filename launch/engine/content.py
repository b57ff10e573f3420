"""What the content of a checkpoint's files must be like before DeepSpeed and torch take it: names, kinds and shapes.

Hashes say that a file is as it was written, not by whom. The loaders check little: what is too short they pad, what is
missing they leave out, and what has another kind or shape fails in the first step.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloze.pipeline.bounds import MOST_COUNT

# Keys of DeepSpeed's files (checkpoint/constants.py): in the model's, at stage 3, the shapes of the parameters; in a
# rank's its part of the optimizer, and in that the states and the flat fp32 weights, which have other keys at stage 3.
SHAPES, PARTITION = "param_shapes", "optimizer_state_dict"
STATES, FLAT = "base_optimizer_state", "single_partition_of_fp32_groups"
STATES_OF_STAGE_3, FLAT_OF_STAGE_3 = "optimizer_state_dict", "fp32_flat_groups"


class OtherContent(Exception):
    """A file of a checkpoint holds what no run of this kind writes."""


@contextlib.contextmanager
def of_file(path: str) -> Iterator[None]:
    """Name the file in what OtherContent says."""
    try:
        yield
    except OtherContent as error:
        raise OtherContent(f"{Path(path).name}: {error}") from error


def fields_in(found: object, where: str, needed: Iterable[object] = ()) -> dict[Any, Any]:
    """A dict that has these names.

    Raises:
        OtherContent: it is none, or lacks one.
    """
    if not isinstance(found, dict):
        raise OtherContent(f"{where} is {described(found)}, expected values by name")
    for name in needed:
        if name not in found:
            raise OtherContent(f"{where} has no {name}")
    return found


def list_in(found: object, where: str, length: int) -> Sequence[Any]:
    """A list of this length, or OtherContent."""
    if not isinstance(found, (list, tuple)) or len(found) != length:
        raise OtherContent(f"{where} is {described(found)}, expected a list of {length}")
    return found


def count_in(found: object, where: str, least: int = 0, most: int = MOST_COUNT) -> int:
    """A whole number within bounds, or OtherContent."""
    if type(found) is not int or not least <= found <= most:
        bounds = f"from {least} on" if most == MOST_COUNT else f"from {least} to {most}"
        wanted = str(least) if least == most else f"a whole number {bounds}"
        raise OtherContent(f"{where} is {described(found)}, expected {wanted}")
    return found


def check_names(found: Iterable[object], where: str, expected: Iterable[str]) -> None:
    """Raise OtherContent unless the names are those expected."""
    there, wanted = set(found), set(expected)
    if wrong := sorted(map(str, there ^ wanted)):
        raise OtherContent(f"{where} {'lacks' if wrong[0] in wanted else 'has'} {wrong[0]:.100}")


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has each of its values by itself, as all that a run writes; others fail, or fill the memory,
    where they are used.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.is_neg():
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def check_tensor(found: object, where: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape whose elements lie apart, so that it can be written to.

    Args:
        dtype: what it must have; of a floating one, any floating one: a run may go on in another precision.

    Raises:
        OtherContent: it is none.
    """
    if not isinstance(found, Tensor) or not has_values(found) or found.shape != torch.Size(shape):
        raise OtherContent(f"{where} is {described(found)}, expected a tensor of shape {tuple(shape)}")
    alike = found.is_floating_point() if dtype.is_floating_point else found.dtype == dtype
    if not alike or found.stride() != torch.empty_like(found, device="meta").stride():
        raise OtherContent(f"{where} is {described(found)}, expected one of {dtype}".replace("torch.", ""))
    return found


def check_values(found: Tensor, where: str, *, negative: bool) -> None:
    """Raise OtherContent for NaN, and for values below 0 where there may be none: such a moment makes a weight NaN."""
    if found.numel():
        low = float(found.detach().aminmax()[0])
        if math.isnan(low) or (low < 0 and not negative):
            raise OtherContent(f"{where} holds {'NaN' if math.isnan(low) else 'values below 0'}")


def check_like(found: object, where: str, own: object) -> None:
    """Raise OtherContent for a plain value of another kind than ours; torch has None for a flag that is not set."""
    if _kind(found) != _kind(own) and not {_kind(found), _kind(own)} <= {"flag", "nothing"}:
        raise OtherContent(f"{where} is {described(found)}, expected one like {described(own)}")


def _kind(value: object) -> object:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return type(value)


def check_state(found: object, where: str, like: Tensor, *, muon: bool, steps: int, number: bool) -> None:
    """Check the states that an optimizer keeps of one parameter; before its first step it keeps none.

    Args:
        like: the parameter, or the flat part of several, that the optimizer updates.
        muon: whether Muon updates it.
        steps: that the optimizer has made.
        number: whether its step may be a plain number (`takes_numbers`).

    Raises:
        OtherContent: they are others.
    """
    state = fields_in(found, where)
    if not state:
        return
    moments = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
    check_names(state, where, moments if muon else ("step", *moments))
    for name in moments:
        values = check_tensor(state[name], f"{where}.{name}", like.shape, torch.float32)
        check_values(values, f"{where}.{name}", negative=name != "exp_avg_sq")
    if not muon:
        step_in(state["step"], f"{where}.step", steps, number=number)


def step_in(found: object, where: str, steps: int = MOST_COUNT, *, number: bool) -> float:
    """The step in an optimizer's states, at most `steps`, or OtherContent.

    Args:
        number: as in `check_state`.
    """
    value: float = found if number and type(found) is int else -1
    if isinstance(found, Tensor) and has_values(found) and not found.dim():
        value = -1 if found.is_complex() or found.dtype == torch.bool else found.item()
    if not 0 <= value <= steps or value != int(value):
        raise OtherContent(f"{where} is {described(found)}, expected a tensor of a step from 0 to {steps}")
    return float(value)


def check_optimizer(
    found: object,
    where: str,
    own_groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[Tensor],
    *,
    steps: int,
    number: bool = False,
    whole: bool = False,
) -> None:
    """Check what torch's `Optimizer.state_dict` has made, before `load_state_dict` takes it.

    Args:
        own_groups: the groups in the optimizer's own state_dict.
        parameters: by their places there.
        steps, number: as in `check_state`.
        whole: whether each parameter with elements must have states.

    Raises:
        OtherContent: it is of another optimizer, or of none.
    """
    content = fields_in(found, where, ("state", "param_groups"))
    check_groups(content["param_groups"], f"{where}.param_groups", own_groups)
    muon = {place: bool(group.get("muon")) for group in own_groups for place in group["params"]}
    states = fields_in(content["state"], f"{where}.state")
    for key, state in states.items():
        if type(key) is not int or key not in muon:
            raise OtherContent(f"{where}.state has {key!r:.60}, expected places of parameters")
        like = parameters[key]
        check_state(state, f"{where}.state.{key}", like, muon=muon[key], steps=steps, number=number)
    if whole and steps:
        for key in muon:
            if parameters[key].numel() and not states.get(key):
                raise OtherContent(f"{where}.state has none of parameter {key}")


def check_groups(found: object, where: str, own_groups: Sequence[Mapping[str, Any]], *, places: bool = True) -> None:
    """Check the groups of `Optimizer.state_dict` against the optimizer's own, as `check_optimizer`.

    Args:
        places: whether the parameters in them must be the same.
    """
    for number, (group, own) in enumerate(zip(list_in(found, where, len(own_groups)), own_groups, strict=True)):
        place = f"{where}.{number}"
        fields_in(group, place, ("params",))
        if places and not _same_places(group["params"], own["params"]):
            raise OtherContent(f"{place}.params is {described(group['params'])}, expected {len(own['params'])} places")
        for name in own.keys() & group.keys() - {"params"}:
            check_like(group[name], f"{place}.{name}", own[name])
        count_in(group.get("step", 0), f"{place}.step")


def takes_numbers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the steps in an optimizer's states may be plain numbers: DeepSpeed's own optimizers count so."""
    return type(optimizer).__module__.startswith("deepspeed")


def _same_places(found: object, own: Sequence[int]) -> bool:
    return isinstance(found, (list, tuple)) and all(type(each) is int for each in found) and list(found) == list(own)


def version_in(found: object, where: str) -> str:
    """A version as DeepSpeed writes its own, or OtherContent."""
    if not isinstance(found, str) or not re.fullmatch(r"\d+(\.\d+)*([.+-]?[a-z0-9]+)*", found, re.ASCII):
        raise OtherContent(f"{where} is {described(found)}, expected a version")
    return found


def described(found: object) -> str:
    """A value in few words."""
    if isinstance(found, Tensor):
        kind = str(found.dtype).removeprefix("torch.")
        if not has_values(found):
            return f"a sparse, quantized, repeated or empty tensor of {kind}"
        value = f" ({found.item()})" if found.numel() == 1 else ""
        return f"a tensor of {kind} of shape {tuple(found.shape)}{value}"
    if isinstance(found, (list, tuple)) and len(found) > 3:
        return f"a list of {len(found)}"
    if isinstance(found, dict):
        return "values by name"
    return " ".join(repr(found).split())[:60]
