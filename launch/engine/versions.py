"""Checks that DeepSpeed is a version that repairs.py was tested with."""

from importlib import metadata

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from packaging.requirements import Requirement

from cloze.pipeline.errors import UserError
from cloze.version import DISTRIBUTION

# What launch/engine/ replaces, calls or reads. Where another version calls a function by another name, a replacement
# would have no effect, silently.
_INNER = {
    DeepSpeedEngine: (
        "_get_all_ckpt_names",
        "allreduce_gradients",
        "backward",
        "get_global_grad_norm",
        "set_gradient_accumulation_boundary",
        "torch_autocast_dtype",
        "torch_autocast_enabled",
    ),
    DeepSpeedZeroOptimizer: ("_update_scale", "load_hp_checkpoint_state_from_checkpoint_dir"),
    DeepSpeedZeroOptimizer_Stage3: ("_update_scale", "load_hp_checkpoint_state_from_checkpoint_dir_stage3"),
}


def check_deepspeed() -> None:
    """Raise UserError for a DeepSpeed that the tests have not seen: its version is outside the range that Cloze asks
    for, or it lacks a function that the repairs replace.
    """
    try:
        asked = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:  # Cloze was imported from a folder, without metadata that names the range
        asked = []
    wanted = next((str(each.specifier) for each in asked if each.name == "deepspeed"), "a version that Cloze asks for")
    tested = all(
        each.specifier.contains(deepspeed.__version__, prereleases=True) for each in asked if each.name == "deepspeed"
    )
    lacking = [f"{kind.__name__}.{name}" for kind, names in _INNER.items() for name in names if not hasattr(kind, name)]
    if tested and not lacking:
        return
    without = f" without {', '.join(lacking)}" if lacking else ""
    raise UserError(
        f"deepspeed: found version {deepspeed.__version__}{without}, expected {wanted}, with which Cloze's "
        f"repairs of it were tested; pip install 'deepspeed{wanted if asked else ''}'"
    )
