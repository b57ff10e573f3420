"""The check of consecutive phases of a run, of which several sections have a list."""

from cloze.pipeline.bounds import MOST
from cloze.pipeline.errors import UserError


def check_ends(name: str, ends: list[float | None]) -> None:
    """Raise UserError, naming the field, unless every phase except the last has an end, in ascending order."""
    if not ends:
        return
    before = 0.0
    for end in ends[:-1]:
        if end is None:
            raise UserError(f"{name}: found a phase without an end before the last, expected one of each but the last")
        if end <= before:
            raise UserError(f"{name}: found an end at {end} after {before:g}, expected phases that follow each other")
        if end > MOST:
            raise UserError(f"{name}: found an end at {end:g}, expected one at {MOST} or before")
        before = end
    if ends[-1] is not None:
        raise UserError(f"{name}: found an end at {ends[-1]} of the last phase, expected null: it lasts to the run's")
