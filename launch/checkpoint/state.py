"""A checkpoint's state.json (step, samples, tokens, hashes of configuration and data) and checksums.json, and which
checkpoints a run has; without torch.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

from cloze.launch.run.runs import CHECKPOINTS, RUN, step_name
from cloze.pipeline.bounds import MOST_COUNT, whole_number
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import publish_json, readable_errors, sha256_of
from cloze.pipeline.untrusted import is_number, read_json

CHECKSUMS = "checksums.json"
STATE = "state.json"


@dataclass(frozen=True)
class TrainState:
    """Progress of a run; with the weights and optimizer states all that a resume needs."""

    step: int = 0
    """Optimizer steps done."""
    samples_consumed: int = 0
    """Position in the endless stream of samples."""
    epoch: int = 0
    """Epoch of the last sample."""
    tokens: int = 0
    """Real tokens trained on, over all ranks."""
    seconds: float = 0.0
    """Seconds of the time budget that were used before the last step, by rank 0's clock; 0 without a budget."""
    evaluated_step: int = -1
    """Step of the last evaluation; -1: none yet."""
    best_step: int = -1
    """Step of the best evaluation; -1: none yet."""
    best_metric: str | None = None
    """The metric by which it is the best."""
    best_value: float | None = None
    """Its value there."""
    evaluations_since_best: int = 0
    """Evaluations without a better value."""
    skipped_steps: int = 0
    """Steps that changed nothing, since their loss or gradient was infinite or NaN."""
    inherited_steps: int = 0
    """Steps that the optimizer had made in the run that this one took its moments from."""

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps that changed the weights, including inherited ones."""
        return self.inherited_steps + self.step - self.skipped_steps


# Types of the fields that a resume computes with. They are checked although the hashes agree: another program may have
# written the file.
_KINDS: dict[str, tuple[type, ...]] = {
    **{field.name: (int,) for field in fields(TrainState)},
    "seconds": (int, float),
    "best_metric": (str, type(None)),
    "best_value": (int, float, type(None)),
    "world_size": (int,),
    "zero_stage": (int,),
    "sharding_stage": (int,),
    "metrics_lines": (int, type(None)),
    "data_streams": (int, type(None)),
    "shaping": (dict,),
    "measures": (dict,),
    "ends": (dict,),
    "trackers": (dict,),
    RUN: (str, type(None)),
}


# Smallest and largest legal values of the numbers from which sizes of loops and tables, and positions, follow.
_RANGES = {
    **{field.name: (0, MOST_COUNT) for field in fields(TrainState) if field.type in ("int", "float", int, float)},
    "evaluated_step": (-1, MOST_COUNT),
    "best_step": (-1, MOST_COUNT),
    "world_size": (1, 1 << 20),
    "zero_stage": (0, 3),
    "sharding_stage": (0, 3),
    "metrics_lines": (0, MOST_COUNT),
    "data_streams": (1, MOST_COUNT),
}
_NEEDED = ("step", "world_size", "zero_stage")


def steps_in(checkpoints: Path) -> list[int]:
    """Steps of the published checkpoints in a folder, ascending, damaged ones included; empty if there is no folder."""
    if not checkpoints.is_dir():
        return []
    with readable_errors(checkpoints):  # of which `glob` says nothing
        paths = [path for path in checkpoints.iterdir() if path.name.startswith("step-")]
    names = (path.name.removeprefix("step-") for path in paths if path.is_dir())
    return sorted(step for name in names if (step := whole_number(name)) is not None)


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of a run's published checkpoints, ascending, damaged ones included."""
    return steps_in(run / CHECKPOINTS)


def damage_by_sizes(run: Path) -> dict[int, str | None]:
    """Why each of a run's published checkpoints, by its step, is damaged, as far as sizes of files say so; None: it
    has all files.
    """
    folder = run / CHECKPOINTS
    return {step: damage(folder / step_name(step), sizes_only=True) for step in steps_in(folder)}


def damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """Why a published checkpoint is damaged, or None if every file is as it was written.

    Args:
        sizes_only: whether the contents of the files are not read, except for the small ones that list them.
    """
    try:
        checksums = read_json(folder / CHECKSUMS)
        if STATE not in checksums:
            return f"{CHECKSUMS} does not list {STATE}"
        for name, (size, digest) in checksums.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if type(size) is not int or path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, expected {size}"
            if not sizes_only and sha256_of(path) != digest:
                return f"{name} has another SHA-256 than when it was written"
        state = read_state(folder)
        # Checkpoints of earlier versions lack this hash.
        if state.get("files_hash") not in (None, hash_of_files(checksums)):
            return f"{STATE} was written with other files than {CHECKSUMS} lists"
        if fault := fault_of_state(state):
            return f"{STATE}: {fault}"
        if state["step"] != int(folder.name.removeprefix("step-").partition(".")[0]):
            return f"{STATE} is that of step {state['step']}"
    except PermissionError as error:
        return f"{Path(error.filename or folder).name}: permission denied"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{CHECKSUMS} or {STATE} is missing or damaged ({type(error).__name__})"
    return None


def fault_of_state(state: Fields) -> str | None:
    """What of a checkpoint's state a resume can't compute with, or None."""
    for name in (*_NEEDED, *(each for each in _KINDS if each in state)):
        if name not in state:
            return f"{name} is missing"
        value, (least, most) = state[name], _RANGES.get(name, (None, None))
        wrong = isinstance(value, bool) or not isinstance(value, _KINDS[name])
        wrong = wrong or (isinstance(value, int | float) and not is_number(value))
        if wrong or (least is not None and value is not None and not least <= value <= most):
            return f"{name} is {str(value)[:60]!r}"
    return None


def write_state(folder: Path, files: dict[str, tuple[int, str]], state: Fields) -> None:
    """Write state.json and, last, checksums.json (size and SHA-256 by file name) of a checkpoint's folder."""
    publish_json(folder / STATE, state | {"files_hash": hash_of_files(files)})
    listed = {**files, STATE: ((folder / STATE).stat().st_size, sha256_of(folder / STATE))}
    publish_json(folder / CHECKSUMS, listed)


def hash_of_files(checksums: dict[str, tuple[int, str]]) -> str:
    """SHA-256 of the names and digests of a checkpoint's files except state.json, which contains it. It detects files
    that were swapped or taken from another checkpoint, even with a rewritten checksums.json.
    """
    parts = sorted((name, digest) for name, (_, digest) in checksums.items() if name != STATE)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_state(folder: Path) -> Fields:
    """state.json of a checkpoint: the fields of TrainState (one that an earlier version lacks has its default),
    `world_size`, `zero_stage`, `sharding_stage`, `config_hash`, `files_hash`, `measures` (how it is measured), `ends`
    (when it is complete) and `shaping` (what shapes the result, by dotted name: fields, and hashes of what was read),
    `run` (the configuration's hash at the run's beginning), `metrics_lines` (lines of metrics.jsonl up to the state)
    and `trackers`, if there are any; of a pretraining `manifest_hash`, `tokenizer_fingerprint` and `data_streams` as
    well.
    """
    state: Fields = vars(TrainState()) | read_json(folder / STATE)
    return state


def train_state(saved: Fields) -> TrainState:
    """The progress of a run that the content of a state.json says."""
    return TrainState(**{field.name: saved[field.name] for field in fields(TrainState)})


def state_path(run: Path, step: int) -> Path:
    """The folder of a run's published checkpoint."""
    return run / CHECKPOINTS / step_name(step)


def saved_alike(state: Fields, world_size: int, stage: int | None) -> bool:
    """Whether each of `world_size` ranks reads only the files that it wrote itself, and those that all ranks read.

    Args:
        stage: of ZeRO; None: any.
    """
    return state["world_size"] == world_size and stage in (None, state["zero_stage"])


def sharding_stage(state: Fields) -> int:
    """ZeRO stage at which DeepSpeed cut the tensors of a checkpoint, by its state.json; files from before optimizers
    were divided by whole tensors have one stage for both."""
    return int(state["sharding_stage"] if "sharding_stage" in state else state["zero_stage"])
