"""When checkpoints are published and saved, and what stays of a run that has to be given up."""

from __future__ import annotations

import time
from functools import partial

from cloze.launch.checkpoint import CheckpointManager
from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.training.averaging import WeightAverage
from cloze.launch.training.callbacks import Callback, RunView
from cloze.launch.training.process import LINES, TRACKERS
from cloze.launch.training.progress import Step, TrainProgress
from cloze.launch.training.throughput import Throughput
from cloze.launch.training.totals import Wishes
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


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
    an evaluation that is to be kept, when a rank wishes it, and at the end.

    Args:
        facts: plain values kept in every checkpoint.
        metrics: rank 0's writer, whose trackers' state is kept, too; None on the other ranks.
        average: of the weights, kept in checkpoints.
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
    ) -> None:
        super().__init__(config)
        self._engine, self._checkpoints, self._progress, self._throughput = engine, checkpoints, progress, throughput
        self._facts, self._metrics, self._average = facts, metrics, average
        self._saved_at = time.monotonic()

    def wishes(self, run: RunView) -> Wishes:
        """A checkpoint when it is time for one by rank 0's clock; the training does not wait for the one before."""
        minutes = self.config.checkpoint.every_minutes
        if minutes is None or run.rank or self._checkpoints.is_writing:
            return Wishes()
        return Wishes(save=time.monotonic() - self._saved_at >= 60 * minutes)

    def on_step(self, run: RunView) -> None:
        state, checkpoint = self._progress.state, self.config.checkpoint
        evaluated = state.evaluated_step == state.step
        kept = self.config.evaluation.keep_best and evaluated and state.best_step == self._progress.good[0].step
        wished = run.agreed is not None and run.agreed.save_wishes > 0
        if kept or wished or (checkpoint.every_steps and state.step % checkpoint.every_steps == 0):
            self._save()
        elif checkpoint.local and state.step % checkpoint.local == 0:
            self._save(local=True)

    def on_end(self, run: RunView, complete: bool) -> None:
        """Leave a checkpoint of the end, and without a doubt about it remove those that are not kept."""
        self._save()
        proven = complete and not self._progress.skipped_in_a_row
        with self._throughput.pause(run.state.step, "save"):
            self._finish(self._progress.state.best_step if proven else None)

    def given_up(self, last: Step) -> UserError:
        """Leave a checkpoint of the last good state of a run that skips too many steps; returns the error that ends it.

        Args:
            last: the last step that was skipped.
        """
        self._save()
        self._finish(None)
        kept = ", ".join(map(str, self._checkpoints.steps()))
        return UserError(
            f"train.learning_rate: found {self.config.train.max_skipped_steps} steps in a row whose loss or gradient "
            f"are infinite or NaN, the last being {last}, expected fewer (train.max_skipped_steps); lower the rate, "
            f"lengthen the warmup or look at the data; checkpoints are there of steps {kept}: remove those that are "
            "too late to continue from"
        )

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
