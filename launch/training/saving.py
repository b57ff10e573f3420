"""When checkpoints are published and saved."""

import time
from collections.abc import Callable, Mapping
from functools import partial

from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.training.callbacks import Callback, RunView
from cloze.launch.training.process import LINES, TRACKERS
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.launch.training.throughput import Throughput
from cloze.launch.training.totals import Wishes
from cloze.launch.training.weight_average import WeightAverage
from cloze.pipeline.fields import Fields

# Seconds that writing a checkpoint may take before the next one is left out: short runs have all of their checkpoints.
_SHORT_SECONDS = 5.0


class Publishing(Callback):
    """Publishes a checkpoint as soon as all ranks have written their parts."""

    def __init__(self, checkpoints: CheckpointManager, throughput: Throughput) -> None:
        self._checkpoints, self._throughput = checkpoints, throughput

    def on_step(self, run: RunView) -> None:
        assert run.agreed is not None, "a step was made"
        if run.agreed.publish_votes >= run.world_size:
            with self._throughput.pause(run.state.step, "save"):
                self._checkpoints.publish()


class Saving(Callback):
    """Saves the state after the last good step: every `checkpoint.every_steps` steps and `every_minutes` minutes, after
    an evaluation that is to be kept, when a rank wishes it, and at the end. One that is due by steps while the one
    before is still being written is left out if writing takes long.

    Args:
        facts: plain values kept in every checkpoint.
        metrics: rank 0's writer, whose trackers' state is kept, too; None on the other ranks.
        average: of the weights, kept in checkpoints.
        warn: called with a line about the first checkpoint that is left out; `on_log` counts all of them.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        checkpoints: CheckpointManager,
        progress: TrainProgress,
        throughput: Throughput,
        facts: Fields,
        metrics: MetricsWriter | None,
        average: WeightAverage | None,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._engine, self._checkpoints, self._progress, self._throughput = engine, checkpoints, progress, throughput
        self._facts, self._metrics, self._average = facts, metrics, average
        self._warn = warn
        self._saved_at = time.monotonic()
        self._writing_since: float | None = None
        self._write_seconds = 0.0  # of the last one that was written
        self._left_out = 0

    def wishes(self, run: RunView) -> Wishes:
        """By rank 0's clock, a checkpoint when it is time for one, and none by steps while a long one is written."""
        if run.rank:
            return Wishes()
        now, minutes = time.monotonic(), self.config.checkpoint.every_minutes
        if self._checkpoints.is_writing:
            if self._writing_since is None:
                self._writing_since = now
            return Wishes(leave_out=max(now - self._writing_since, self._write_seconds) > _SHORT_SECONDS)
        if self._writing_since is not None:
            self._write_seconds = now - self._writing_since
            self._writing_since = None
        return Wishes(save=minutes is not None and now - self._saved_at >= 60 * minutes)

    def on_step(self, run: RunView) -> None:
        state, checkpoint = self._progress.state, self.config.checkpoint
        evaluated = state.evaluated_step == state.step
        kept = self.config.evaluation.keep_best and evaluated and state.best_step == self._progress.good[0].step
        wished = run.agreed is not None and run.agreed.save_wishes > 0
        due = bool(checkpoint.every_steps) and state.step % checkpoint.every_steps == 0
        due_locally = checkpoint.local is not None and state.step % checkpoint.local == 0
        if kept or wished:
            self._save()
        elif not (due or due_locally):
            return
        elif self._checkpoints.is_writing and run.agreed is not None and run.agreed.leave_out_wishes > 0:
            self._leave_out(state.step)
        else:
            self._save(local=not due)

    def _leave_out(self, step: int) -> None:
        self._left_out += 1
        if self._left_out == 1:
            self._warn(
                f"checkpoint.every_steps: step {step} was reached while the checkpoint before was still being written, "
                "and is left out, as later ones will be; the curve speed/checkpoints_left_out counts them. Save less "
                "often, or on a faster disk"
            )

    def on_log(self, run: RunView, scalars: Mapping[str, float]) -> Mapping[str, float] | None:
        """Checkpoints left out since the start, if there are any."""
        return {"speed/checkpoints_left_out": self._left_out} if self._left_out else None

    def on_end(self, run: RunView, complete: bool) -> None:
        """Save the end of the run; remove old checkpoints only if the run is complete and its last step was good."""
        self._save()
        proven = complete and not self._progress.skipped_in_a_row
        with self._throughput.pause(run.state.step, "save"):
            self._finish(self._progress.state.best_step if proven else None)

    def give_up(self) -> None:
        """Leave a checkpoint of the last good state of a run that skips too many steps."""
        self._save()
        self._finish(None)

    def _save(self, local: bool = False) -> None:
        """Begin to save the state after the last good step; what was skipped since is tried again from there.

        Args:
            local: as in CheckpointManager.save.
        """
        self._progress.settle()
        state, window = self._progress.good
        if self._progress.saved == state:  # not by the step: an evaluation after a resume changes the state
            return
        with self._throughput.pause(self._progress.state.step, "save"):
            if not self._progress.skipped_in_a_row:
                self._checkpoints.retire(state.best_step)
            facts = dict(self._facts)
            if self._metrics:
                facts[LINES] = self._metrics.num_lines(state.step, state.evaluated_step)
                if tracked := self._metrics.tracked():
                    facts[TRACKERS] = tracked
            files = self._average.files() if self._average else {}
            self._checkpoints.save(self._engine, state, facts, {"window": window.cpu()}, files, local=local)
            if not self.config.checkpoint.asynchronous:
                self._checkpoints.publish()
        self._progress.saved = state
        if not local:
            self._saved_at = time.monotonic()

    def _finish(self, best: int | None) -> None:
        beat = partial(self._throughput.heartbeat.beat, self._progress.state.step, "save")
        self._checkpoints.finish(best, beat)
