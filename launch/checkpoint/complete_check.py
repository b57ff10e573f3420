"""Whether a run that has ended may be begun again: as it was, or to go on. With anything else it would not be measured
again, but its configuration would be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from cloze.launch.checkpoint.completion import ENDS, METRIC, completion, ending, ends_of, reached
from cloze.launch.checkpoint.state import (
    TrainState,
    checkpoint_steps,
    fault_of_state,
    read_state,
    state_path,
    train_state,
)
from cloze.launch.config import FinetuneConfig, RunConfig
from cloze.launch.run import runs
from cloze.launch.run.integrity import is_lost
from cloze.launch.run.resume_check import config_hash, fields_made, shaping_of
from cloze.launch.run.status_file import RefusedStartError, read_status
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import is_number

# The fields that say on what a run is measured; the sets are told by the hashes of their content.
_ON_WHAT = "evaluation.samples", "evaluation.masking_rate"
_DATA = runs.MANIFEST_HASH, runs.POOLED_SETS  # of which none may come or go: their losses are one
_HASHES = runs.SET_HASH, runs.VALIDATION_HASH
_SETS = "evaluation.sets."


def saved_facts(config: RunConfig, facts: runs.Facts) -> Fields:
    """What a checkpoint's state.json says of the configuration of its run."""
    return {
        "config_hash": config_hash(config),
        "shaping": shaping_of(config, facts),
        "measures": measures_of(config, facts),
        "ends": ends_of(config),
    }


def measures_of(config: RunConfig, facts: runs.Facts) -> dict[str, object]:
    """The fields and the facts that say how a run is measured, by dotted names."""
    return {
        **{f"evaluation.{name}": value for name, value in runs.flatten(asdict(config.evaluation)).items()},
        **{name: value for name, value in facts.items() if name.startswith((*_HASHES, *_DATA))},
    }


def said_otherwise(saved: Fields, config: RunConfig, facts: runs.Facts) -> bool:
    """Whether a checkpoint's state.json says otherwise how its run is measured, or when it ends, than its configuration
    does now; what an earlier version has not written does not count.
    """
    now = saved_facts(config, facts)
    return any(
        now[part].get(name) != value for part in ("measures", "ends") for name, value in saved.get(part, {}).items()
    )


def other_measure(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The first name by which two results of `measures_of` are of other samples, so that values do not compare; else
    None.

    What is null is as good as not there, and hashes are compared where both have them: an earlier version may not
    know them, and sets that the metric does not count may come and go.
    """
    hashes = (name for name in before.keys() & now.keys() if name.startswith(_HASHES))
    known = tuple(kind for kind in _DATA if any(name.startswith(kind) for name in before))
    data = (name for name in before.keys() | now.keys() if name.startswith(known))
    return next((name for name in (*_ON_WHAT, *sorted({*hashes, *data})) if before.get(name) != now.get(name)), None)


def check_begun_again(config: RunConfig, facts: runs.Facts, saved: Fields, in_a_table: bool = False) -> None:
    """Refuse to begin a run again that would not go on, if it is not as it was.

    Args:
        saved: the content of state.json of the checkpoint that it goes on from; empty: it is lost, and the run is
            complete if its status says so.
        in_a_table: whether its values are shown beside those of others, of the same sets.

    Raises:
        RefusedStartError: names the first field that differs, with both values.
    """
    folder = Path(config.output)
    before, now = _before(config, saved), {**_now(config, facts), **ends_of(config)}
    state = train_state(saved) if saved else None
    measured = state is not None and _is_measured(state, now, in_a_table)
    ended = _ended(folder, before, state, measured)
    other = other_measure(before, now)
    longer = [name for name in ENDS if before.get(name) != now[name]]
    if ended and not longer:
        by_length = state is not None and ending(config.train, state) is not None
        if name := other or next(_others(config, before, now, by_length, in_a_table), None):
            raise RefusedStartError(
                f"{folder}: found a complete run with {name} {before.get(name)}, expected {now.get(name)}: it is not "
                "measured again, and its values would not compare with those of new runs; give it as it was, or "
                "another --output"
            )
    elif state is not None and measured and (end := completion(config, state)):
        if ended:
            raise RefusedStartError(
                f"{folder}: found a run that has ended ({ended}), expected one that goes on with {longer[0]} "
                f"{now[longer[0]]} instead of {before.get(longer[0])}: {end}; give it as it was, or so that it goes on"
            )
        if other and ending(config.train, state):  # otherwise it goes on, and its best value is forgotten
            raise RefusedStartError(
                f"{folder}: found a run that was measured with {other} {before.get(other)}, expected {now.get(other)}: "
                f"{end}, and nothing is measured again; give it as it was, or measure its checkpoints with cloze "
                "evaluate"
            )


def check_folder_begun_again(config: RunConfig, facts: runs.Facts) -> None:
    """`check_begun_again` for the run in the folder of the configuration, in a table, before it is begun."""
    check_begun_again(config, facts, _newest(Path(config.output)), in_a_table=True)


def other_end(config: RunConfig) -> str | None:
    """One line if the run in the folder of the configuration has ended where it is not to end now; else None."""
    folder = Path(config.output)
    before, now = _before(config, _newest(folder)), ends_of(config)
    for name in ENDS:
        if before.get(name) != now[name]:
            return (
                f"{folder}: found a run that has ended with {name} {before.get(name)}, expected {now[name]}; give it "
                "as it was, or another --output"
            )
    return None


def _others(config: RunConfig, before: Fields, now: Fields, by_length: bool, in_a_table: bool) -> Iterator[str]:
    """The names, besides those of `other_measure`, by which a complete run is not as it was.

    Args:
        by_length: whether it has ended by its steps or its time, whatever its evaluations were.
    """
    # a fine-tuning's results are those of the best checkpoint, and of the last one where that is by another metric
    fine_tunes = isinstance(config, FinetuneConfig)
    compared = [METRIC] if in_a_table or not fine_tunes or not by_length else []
    compared += ["evaluation.keep_best"] if fine_tunes else []
    ends = now["evaluation.target"] is not None or now["evaluation.patience"] is not None
    decides = ends or fine_tunes and now["evaluation.keep_best"]
    compared += ["evaluation.every_steps"] if decides else []
    if in_a_table:
        compared += sorted(name for name in before.keys() | now.keys() if _is_other_set(name, before, now))
    yield from (name for name in compared if before.get(name) != now.get(name))
    shaping = (name for name in sorted(before.keys() & now.keys()) if not name.startswith(("evaluation.", *ENDS)))
    yield from (name for name in shaping if before[name] != now[name])


def _is_other_set(name: str, before: Fields, now: Fields) -> bool:
    """Whether a name is that of a set which is not at another place alone."""
    own_hash = runs.SET_HASH + name.removeprefix(_SETS)
    return name.startswith(_SETS) and (own_hash not in before or before[own_hash] != now.get(own_hash))


def _now(config: RunConfig, facts: runs.Facts) -> Fields:
    return {**shaping_of(config, facts), **measures_of(config, facts)}


def _before(config: RunConfig, saved: Fields) -> Fields:
    """The same of a run as it was, and its ends; what its checkpoint does not say, since an earlier version has written
    it, by the files of its folder.
    """
    folder = Path(config.output)
    known: Fields = {**saved.get("shaping", {}), **saved.get("measures", {}), **saved.get("ends", {})}
    if METRIC not in known and not is_lost(folder / runs.CONFIG):
        data = folder / runs.DATA
        known = {**fields_made(folder, config), **({} if is_lost(data) else runs.read_fields(data)), **known}
    return known


def _is_measured(state: TrainState, now: Fields, in_a_table: bool) -> bool:
    """Whether its evaluation is done. A run without held-out samples has none, and may get one; in a table it is as it
    is.
    """
    has_none = state.evaluated_step == -1 and (in_a_table or runs.POOLED_SETS not in now)
    return has_none or state.evaluated_step == state.step


def _ended(folder: Path, before: Fields, state: TrainState | None, measured: bool) -> str | None:
    """Why a run has ended, or None."""
    if state is None:
        return "it is complete" if read_status(folder).get("state") == "complete" else None
    steps, *others = (before.get(name) for name in ENDS)
    if not is_number(steps) or not all(value is None or is_number(value) for value in others):
        return None  # its configuration is lost or was changed by hand
    return reached(dict.fromkeys((*ENDS, METRIC)) | before, state) if measured else None


def _newest(folder: Path) -> Fields:
    """The content of state.json of a run's newest checkpoint, of a complete one that of its end; empty: it is lost."""
    status, steps = read_status(folder), checkpoint_steps(folder)
    if not steps or status.get("state") == "complete" and steps[-1] != status["step"]:
        return {}
    try:
        saved = read_state(state_path(folder, steps[-1]))
    except (OSError, ValueError, TypeError):
        return {}
    return saved if fault_of_state(saved) is None and saved["step"] == steps[-1] else {}
