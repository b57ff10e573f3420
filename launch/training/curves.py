"""Curves of a run: a line of metrics every `train.log_every_steps` steps, and the line of progress on the terminal."""

import math
from collections.abc import Sequence
from pathlib import Path

from cloze.launch.checkpoint.completion import ending
from cloze.launch.checkpoint.state import TrainState
from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Outcome
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.progress_line import ProgressLine
from cloze.launch.run.status_file import set_status
from cloze.launch.system.console import Console
from cloze.launch.training.callbacks import Callback, RunView, with_more
from cloze.launch.training.metric_sums import WindowSums
from cloze.launch.training.objective import SourceSums, TrainingObjective
from cloze.launch.training.skipped_steps import TrainProgress
from cloze.launch.training.throughput import Throughput


class Curves(Callback):
    """Writes lines of metrics.

    Args:
        metrics: rank 0's writer, from the run's step on; None on the other ranks.
        sources: what measures each source of a mixture by itself.
        watchers: all that watch the run, whose `on_log` adds scalars to a line; this one is among them.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: TrainingObjective,
        sources: SourceSums | None,
        progress: TrainProgress,
        throughput: Throughput,
        console: Console,
        metrics: MetricsWriter | None,
        watchers: Sequence[Callback],
    ) -> None:
        super().__init__(config)
        self.metrics = metrics
        self._objective, self._sources = objective, sources
        self._progress, self._throughput = progress, throughput
        self._line, self._watchers = ProgressLine(console), watchers

    def on_step(self, run: RunView) -> None:
        ended = ending(self.config.train, run.state) is not None
        if run.state.step % self.config.train.log_every_steps == 0 or ended:
            self._progress.settle()
            self._write_line(run)

    def _write_line(self, run: RunView) -> None:
        assert run.outcome is not None, "a step was made"
        state, window = self._progress.state, self._progress.window.take()
        self._progress.window_changed()
        scalars = self._losses(window) | self._of_last_step(run.outcome)
        scalars |= {
            "train/skipped_steps": state.skipped_steps,
            "data/padding_share": window.padding / (window.tokens + window.padding),
            "data/tokens": state.tokens,
            "data/samples": state.samples_consumed,
            "data/epoch": state.epoch,
        }
        if self._sources:
            shares = self._sources.progress(state.samples_consumed)
            scalars |= {f"data/{name}": value for name, value in shares.items()}
        scalars |= self._throughput.scalars()
        self.write(state, with_more(self._watchers, "on_log", run, scalars))
        if self.metrics:
            set_status(Path(self.config.output), "running", state.step)
        self._throughput.reset()

    def _losses(self, window: WindowSums) -> dict[str, float]:
        if window.steps <= 0.5:  # whole numbers but for rounding; without a good step there is no loss
            return {}
        means = {"loss": window.objective[0] / window.steps} | self._objective.scalars(window.objective)
        if self._sources:
            means |= self._sources.scalars(window.sources)
        return {f"train/{name}": value for name, value in means.items()}

    @staticmethod
    def _of_last_step(outcome: Outcome) -> dict[str, float]:
        scalars = {"train/learning_rate": outcome.rate}
        norm = float(outcome.gradient_norm)
        if math.isfinite(norm):  # a skipped step has none
            scalars["train/gradient_norm"] = norm
        if outcome.loss_scale is not None:
            scalars["train/loss_scale"] = outcome.loss_scale
        return scalars

    def write(self, state: TrainState, scalars: dict[str, float], progress: bool = True) -> None:
        """Write scalars of a step.

        Args:
            progress: whether the terminal shows them, too.
        """
        if self.metrics:
            scalars = self.metrics.write(state.step, scalars)
        if progress:
            budget = self.config.train.budget_seconds
            left = None if budget is None else budget - state.seconds
            self._line.show(state.step, self.config.train.max_steps, scalars, left)
