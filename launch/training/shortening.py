"""A run that the command line makes shorter than its recipe does: the recipe's warmup shrinks with it."""

from cloze.launch.parsing import Given


def shorten(given: Given) -> dict[str, object]:
    """`schedule.warmup_of_steps` of a run with fewer steps on the command line than its recipe has; a warmup on the
    command line is meant for this run.
    """
    if given.typed & {"schedule", "schedule.warmup_of_steps"}:
        return {}
    if "schedule.warmup_steps" in given.typed:
        return {"schedule.warmup_of_steps": None}
    if given.value("schedule.warmup_steps") is None or given.value("schedule.warmup_of_steps") is not None:
        return {}
    if "train.max_steps" in given.typed:
        recipe, steps = given.untyped("train.max_steps"), given.value("train.max_steps")
        return {"schedule.warmup_of_steps": recipe} if recipe and steps and steps < recipe else {}
    if given.value("tokens"):  # of `cloze plan`, from which the steps follow
        return {"schedule.warmup_of_steps": given.value("train.max_steps")}
    return {}
