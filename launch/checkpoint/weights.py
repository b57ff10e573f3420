"""Whole weights of a run's checkpoints, for any process that has not trained them."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from cloze.launch.checkpoint.deepspeed_files import known_content, whole_weights
from cloze.launch.checkpoint.folder import CheckpointFolder
from cloze.launch.checkpoint.state import checkpoint_steps
from cloze.launch.checkpoint.weight_averages import whole_average
from cloze.launch.run.runs import CHECKPOINTS, check_own
from cloze.pipeline.errors import UserError


def read_weights(
    run: Path, step: int | Literal["best"] | None, warn: Callable[[str], None], *, ema: bool = False
) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and whole fp32 weights of a run's checkpoint, of any ZeRO stage.

    Args:
        step: None: the newest good one; best: the one of the best evaluation, by the newest good one.
        ema: whether to read their moving average instead.

    Raises:
        UserError: there is no such checkpoint, or it is damaged or another run's.
    """
    checkpoints = CheckpointFolder(run / CHECKPOINTS, warn)
    found = _found(run, checkpoints, step)
    folder = checkpoints.path(found)
    check_own(run, folder, checkpoints.state(found))
    with known_content(folder):
        weights = whole_weights(folder)
        return found, whole_average(folder, weights) if ema else weights


def _found(run: Path, checkpoints: CheckpointFolder, wanted: int | Literal["best"] | None) -> int:
    """The step of the good checkpoint that `wanted` names, or raise UserError."""
    if isinstance(wanted, int):
        step = wanted
    elif (newest := checkpoints.latest()) is None:
        raise UserError(
            f"{run}: found no good checkpoint under checkpoints/, expected a folder that `cloze "
            "pretrain` wrote; train first, or give the run's folder"
        )
    elif wanted is None:
        return newest
    else:
        state = checkpoints.state(newest)
        check_own(run, checkpoints.path(newest), state)
        step = state["best_step"]
    if not checkpoints.is_good(step):
        found = ", ".join(map(str, checkpoints.steps())) or "none"
        raise UserError(
            f"{run}: no good checkpoint of step {step}; the run has {found}"
            + ("; --evaluation.keep_best true keeps the best, until something removes it" if wanted == "best" else "")
        )
    return step


def read_average(
    run: Path,
    count: int,
    step: int | Literal["best"] | None,
    warn: Callable[[str], None],
    *,
    ema: bool,
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Steps, ascending, and mean fp32 weights of the checkpoint that `step` names, as in `read_weights`, and of the
    `count` - 1 before it. Buffers are averaged too; sums are computed in fp64.

    Raises:
        UserError: as `read_weights`, or the run has fewer checkpoints up to that step.
    """
    last, weights = read_weights(run, step, warn, ema=ema)
    steps = [saved for saved in checkpoint_steps(run) if saved <= last][-count:]
    if len(steps) < count:
        raise UserError(
            f"{run}: found {len(steps)} checkpoints up to step {last}, expected the {count} that are to be "
            "averaged; train with a larger --checkpoint.keep_last, or average fewer"
        )
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    sums = {name: tensor.double() for name, tensor in weights.items()}
    for earlier in steps[:-1]:
        found = read_weights(run, earlier, warn, ema=ema)[1]
        if {name: tensor.shape for name, tensor in found.items()} != shapes:
            raise UserError(
                f"{run}: found other weights in the checkpoint of step {earlier} than in that of step {last}, expected "
                "those of one model; leave --average out"
            )
        for name, tensor in found.items():
            sums[name] += tensor
    return steps, {name: (total / count).to(weights[name].dtype) for name, total in sums.items()}
