"""The folder of a run's checkpoints, as every process reads it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from cloze.launch.checkpoint.state import damage, read_state, steps_in
from cloze.launch.run.runs import step_name
from cloze.pipeline.fields import Fields


class CheckpointFolder:
    """The published checkpoints of one run, `FOLDER/step-00001000/`."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.warn = warn
        self._good: set[int] = set()  # steps that were verified or written by this process
        self._damaged: set[int] = set()

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending, damaged ones included."""
        return steps_in(self.folder)

    def good_steps(self) -> Iterator[int]:
        """Steps of the undamaged checkpoints, newest first; a damaged one is reported once and skipped."""
        for step in reversed(self.steps()):
            if step not in self._good | self._damaged:
                problem = damage(self.path(step))
                (self._damaged if problem else self._good).add(step)
                if problem:
                    self.warn(f"{self.path(step)}: damaged ({problem}); skipped")
            if step in self._good:
                yield step

    def latest(self) -> int | None:
        """Step of the newest undamaged checkpoint; damaged ones are reported and skipped."""
        return next(self.good_steps(), None)

    def is_good(self, step: int) -> bool:
        """Whether there is an undamaged checkpoint of a step."""
        return step in self.steps() and (step in self._good or damage(self.path(step)) is None)

    def state(self, step: int) -> Fields:
        """Content of a checkpoint's state.json, including the facts that it was saved with."""
        return read_state(self.path(step))
