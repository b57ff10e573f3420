"""The training loop: from a batch to the optimizer's step, and what watches it."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cloze.launch.checkpoint.completion import completion
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.config import RunConfig
from cloze.launch.engine.engine import Engine, Outcome
from cloze.launch.system.devices import to_device
from cloze.launch.system.distributed import NumbersOnHost
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training.callbacks import Callback, RunView
from cloze.launch.training.objective import ModelOutput, SourceSums, TrainingObjective, WholeBatchObjective
from cloze.launch.training.schedules import multiplier
from cloze.launch.training.skipped_steps import SkippedTooOften, TrainProgress
from cloze.launch.training.throughput import Throughput
from cloze.launch.training.totals import Agreed, StepTotals
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.loading.batches import RankBatch


def dropout_seed(*key: int) -> int:
    """A seed for (seed, step, micro-step, rank), or (seed, step): close keys give unrelated ones, 0 to 2^63 - 1."""
    digest = hashlib.blake2b(b"".join(part.to_bytes(8, "little") for part in key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class Loop:
    """Trains one engine on one stream of batches, the same way on one process and on many."""

    config: RunConfig
    engine: Engine
    objective: TrainingObjective
    sources: SourceSums | None
    """What measures each source of a mixture by itself."""
    flops: Callable[[MicroBatch], float]
    """Model FLOPs of a micro-batch."""
    progress: TrainProgress
    checkpoints: CheckpointManager
    watchers: Sequence[Callback]
    """Called in this order before the first step and after each, in reverse order at the end."""
    give_up: Callable[[], None]
    """Called when too many steps in a row were skipped: leaves a checkpoint of the last good state."""
    throughput: Throughput
    environment: Environment
    stopping: bool = False
    """Whether the ranks have agreed to stop, with a checkpoint."""
    _began: float = 0.0  # when the clock would have been started without interruption

    def run(self, stream: Iterator[RankBatch]) -> bool:
        """Train until the run is complete; returns False if it was asked to stop before.

        Args:
            stream: batches from `progress.state.samples_consumed` on.

        Raises:
            UserError: loss or gradient were infinite or NaN too often in a row, or a checkpoint could not be written.
        """
        self.engine.model.train()
        self._began = time.monotonic() - self.progress.state.seconds
        self.progress.begin()
        try:
            for watcher in self.watchers:
                watcher.on_start(self._view())
            self.throughput.reset()
            # What each of the three says is the same on all ranks: the state, `_exchange`, and `publish`.
            while not (self.completion or self.stopping or self.checkpoints.must_end):
                self.step(stream)
            for watcher in reversed(self.watchers):
                watcher.on_end(self._view(), self.completion is not None)
        except SkippedTooOften as skipped:
            self.give_up()
            raise skipped.error(self.config.train.max_skipped_steps, self.checkpoints.steps()) from None
        return self.completion is not None

    def step(self, stream: Iterator[RankBatch]) -> None:
        """One optimizer step, and what watches it."""
        batch = self._next(stream)
        totals = self._exchange(batch)
        for watcher in self.watchers:
            watcher.before_step(self._view())
        self.throughput.passes.start()
        objective = self.objective
        known = self._show_batch(objective, batch, totals) if isinstance(objective, WholeBatchObjective) else None
        sums: Tensor | None = None
        for number, micro_batch in enumerate(batch.micro_batches):
            last = number == len(batch.micro_batches) - 1
            self._beat("compute")
            self.throughput.flops += self.flops(micro_batch)
            loss, parts = self._loss(batch, number, totals, known)
            if last:
                self.throughput.passes.stop()  # in its backward the ranks meet
            self.engine.backward(loss, last=last)
            sums = parts if sums is None else sums + parts
        assert sums is not None, "a batch has a micro-batch"
        outcome = self.engine.step(self._rate())
        agreed = self._count(batch, totals, outcome, sums)
        for watcher in self.watchers:
            watcher.on_step(self._view(outcome, agreed))

    @property
    def completion(self) -> str | None:
        """Why the run needs no further step, or None."""
        return completion(self.config, self.progress.state)

    def _next(self, stream: Iterator[RankBatch]) -> RankBatch:
        self._beat("data")
        began = time.perf_counter()
        batch = next(stream)
        self.throughput.wait(time.perf_counter() - began)
        return batch

    def _exchange(self, batch: RankBatch) -> StepTotals:
        """The step's one exchange of numbers: the objective's counts, and what the ranks wish. Collective."""
        self._beat("collective")
        view = self._view()
        wishes = [watcher.wishes(view) for watcher in self.watchers]
        own = Agreed(
            tokens=batch.num_tokens,
            stop_wishes=any(wish.stop for wish in wishes),
            save_wishes=any(wish.save for wish in wishes),
            leave_out_wishes=any(wish.leave_out for wish in wishes),
            publish_votes=self.checkpoints.publish_votes(),
            seconds=time.monotonic() - self._began if self.environment.is_main else 0.0,
        )
        return StepTotals.exchange(self.objective.counts(batch.micro_batches), own, self.engine.device)

    def _loss(
        self, batch: RankBatch, number: int, totals: StepTotals, known: ModelOutput | None
    ) -> tuple[Tensor, Tensor]:
        """Forward pass of a micro-batch.

        Args:
            number: of the micro-batch in the batch.
            known: the model's output with its graph, if the objective was shown it already; None otherwise.

        Returns:
            The micro-batch's share of the loss, (), and its sums, float64: the objective's, then those of the sources.
        """
        # The sources of a mixture go to the device in the same copy, and not to the model.
        more = {} if batch.sources is None else {"sources": batch.sources[number]}
        micro_batch = to_device(batch.micro_batches[number] | more, self.engine.device)
        sources = micro_batch.pop("sources", None)
        output = self._forward(number, micro_batch) if known is None else known
        loss, sums = self.objective(output, micro_batch, totals.divisors)
        if sources is not None:
            assert self.sources is not None, "batches of a mixture come with what measures its sources"
            sums = torch.cat([sums, self.sources.sums(output, micro_batch, sources)])
        return loss, sums

    def _forward(self, number: int, micro_batch: MicroBatch) -> ModelOutput:
        """The model's output for a micro-batch on the device: the same however often, by the key of its dropout."""
        seed, step = self.config.seed, self.progress.state.step
        more = {"step_seed": dropout_seed(seed, step)} if self.objective.STEP_SEED else {}
        key = dropout_seed(seed, step, number, self.environment.rank)
        return self.engine(**micro_batch, dropout_seed=key, **more)

    def _show_batch(self, objective: WholeBatchObjective, batch: RankBatch, totals: StepTotals) -> ModelOutput | None:
        """Show the objective the outputs of all micro-batches, computed without gradients. A lone micro-batch need not
        be computed again: its output is returned, with its graph. Collective.
        """
        alone = len(batch.micro_batches) == 1
        outputs = []
        with torch.set_grad_enabled(alone):
            for number, micro_batch in enumerate(batch.micro_batches):
                self._beat("compute")
                outputs.append(self._forward(number, to_device(micro_batch, self.engine.device)))
        self.throughput.passes.stop()  # the ranks meet here
        self._beat("collective")
        objective.observe(outputs, totals.divisors)
        self.throughput.passes.start()
        return outputs[0] if alone else None

    def _rate(self) -> float:
        """The learning rate of the step, by its number or, with a time budget, by the time used."""
        train, progress = self.config.train, self.progress
        at: float = progress.state.step
        end: float = train.max_steps
        if train.budget_seconds is not None:
            at, end = progress.seconds, train.budget_seconds
        return train.peak_rate * multiplier(self.config.schedule, at, end, progress.state.tokens)

    def _count(self, batch: RankBatch, totals: StepTotals, outcome: Outcome, sums: Tensor) -> Agreed:
        """Count the step, which may still run on the device; returns what all ranks know of it."""
        progress, world_size = self.progress, self.environment.world_size
        progress.window.add(sums, outcome.skipped, world_size, batch.num_tokens, batch.num_padding)
        self.throughput.add(batch.num_tokens)
        skipped, agreed = NumbersOnHost(outcome.skipped), totals.agreed()
        state = replace(
            progress.state,
            step=progress.state.step + 1,
            epoch=batch.epoch,
            samples_consumed=batch.position + batch.num_samples,
            tokens=progress.state.tokens + int(agreed.tokens),
            # The time by which this step's rate was chosen: a run ends after the step that has seen its budget used
            # up, so that its last rate is the schedule's last one.
            seconds=progress.seconds if self.config.train.budget_seconds is not None else progress.state.seconds,
        )
        progress.add(skipped, state, batch.position)
        progress.seconds = agreed.seconds
        self.stopping = self.stopping or agreed.stop_wishes > 0
        progress.settle(leave=1)
        return agreed

    def _beat(self, phase: str) -> None:
        self.throughput.heartbeat.beat(self.progress.state.step, phase)

    def _view(self, outcome: Outcome | None = None, agreed: Agreed | None = None) -> RunView:
        rank, world_size = self.environment.rank, self.environment.world_size
        model, device, state = self.engine.model, self.engine.device, self.progress.state
        return RunView(model, device, rank, world_size, state, outcome, agreed, self.stopping)
