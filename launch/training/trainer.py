"""The training loop: step, log, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cloze.launch.checkpoint import CheckpointManager, TrainState
from cloze.launch.config import RunConfig
from cloze.launch.engine.state import Engine, compute_dtype, set_learning_rate, step_skipped, weight_copies
from cloze.launch.run import runs
from cloze.launch.run.heartbeat import Heartbeat
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import measured_anew, numbers_on, peak_flops, peak_warning, to_device
from cloze.launch.system.environment import Environment
from cloze.launch.training.averaging import WeightAverage
from cloze.launch.training.callbacks import Callback, RunView, with_more
from cloze.launch.training.goals import completion, ending, evaluated
from cloze.launch.training.inspection import Inspector
from cloze.launch.training.objective import SourceSums, TrainingObjective, WholeBatchObjective
from cloze.launch.training.outcomes import Outcomes, Step
from cloze.launch.training.profiling import StepProfiler
from cloze.launch.training.schedules import multiplier
from cloze.launch.training.throughput import Throughput
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import RankBatch

# What the window counts beside the objective's own sums: steps that changed the weights, skipped ones, real tokens,
# tokens that padding would have added.
_WINDOW = ("steps", "skipped", "tokens", "padding")
_TRACKERS = "trackers"  # entry of state.json
_SOURCES = "sources"  # of a micro-batch's samples, on their way to the device beside what the model takes


def dropout_seed(*key: int) -> int:
    """A seed for (seed, step, micro-step, rank), or (seed, step): neighbouring keys give unrelated ones, 0 to 2^63 -
    1.
    """
    digest = hashlib.blake2b(b"".join(part.to_bytes(8, "little") for part in key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Trainer:
    """Trains one engine on one stream of batches, the same way on one process and on many.

    Args:
        config: with `seed` and the sections train, schedule, checkpoint, evaluation and monitor of launch/config/.
        engine: DeepSpeed's.
        objective: see launch/pretrain/objectives/.
        evaluate: measures the model on the validation data, on every rank alike: value by name. It calls its argument
            now and then, as a sign of life. None: no validation data.
        flops: model FLOPs of a micro-batch.
        facts: plain values kept in every checkpoint.
        callbacks: the user's own, called at each event.
        sources: what measures each source of a mixture by itself (launch/pretrain/sources.py).
        average: of the weights, measured beside them and kept in checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: Engine,
        objective: TrainingObjective,
        evaluate: Callable[[Callable[[], None]], dict[str, float]] | None,
        flops: Callable[[dict], float],
        checkpoints: CheckpointManager,
        console: Console,
        environment: Environment,
        device: torch.device,
        heartbeat: Heartbeat,
        profiler: StepProfiler,
        facts: dict,
        callbacks: Sequence[Callback] = (),
        sources: SourceSums | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        self.config, self.train = config, config.train
        self.engine, self.objective, self.sources = engine, objective, sources
        self.evaluate, self.flops = evaluate, flops
        self.checkpoints, self.console = checkpoints, console
        self.heartbeat, self.profiler = heartbeat, profiler
        self.environment, self.device, self.facts = environment, device, facts
        self.callbacks, self.average = callbacks, average
        self.metrics: MetricsWriter | None = None
        self.state = TrainState()
        self.tracked: dict[str, dict] = {}
        """What the checkpoint that the run goes on from says of its trackers (run/trackers.py)."""
        self.throughput = Throughput(device, peak_flops(device, compute_dtype(engine)))
        self.inspector = Inspector(engine, device, environment.world_size)
        self.show: Callable[[int], None] | None = None
        self._num_sums = len(objective.NAMES) + (sources.num_sums if sources else 0)
        self.outcomes = Outcomes(
            self._num_sums + len(_WINDOW),
            device,
            most_skipped=self.train.max_skipped_steps,
            keeps_skipped=engine.fp16_enabled(),
            on_skip=self._report_skip,
        )
        self._stop_agreed = False
        self._began = 0.0  # when the clock would have been started without interruption
        self._seconds = 0.0  # by rank 0's clock, as all ranks know them
        self._rate = 0.0
        self._peak_doubted = False
        self._slow_since = -1, math.inf  # the rank that the others wait for, and the moment since when
        self._told_slow: set[int] = set()

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint."""
        saved = self.outcomes.saved
        return None if saved is None else saved.step

    def resume(self, step: int) -> None:
        """Go on from a published checkpoint of this run."""
        self.state, rank_states = self.checkpoints.load(self.engine, step)
        for saved in rank_states:
            # One of another shape had other sources: their sums are left out.
            if saved["window"].shape == self.outcomes.window.shape:
                self.outcomes.window += saved["window"].to(self.device)
        self.outcomes.saved = self.state
        self.tracked = self.checkpoints.state(step).get(_TRACKERS, {})
        self._seconds = self.state.seconds
        if self.average:
            elastic = self.checkpoints.state(step)["world_size"] != self.environment.world_size
            if not self.average.load(self.checkpoints.path(step), None if elastic else self.environment.rank):
                self.console.warn(f"step {step} holds no moving average of the weights: one begins with them here")

    def inherit(self, checkpoints: CheckpointManager, step: int) -> None:
        """Take weights and moments of another run's checkpoint; everything else begins at 0."""
        before, _ = checkpoints.load(self.engine, step)
        self.state = TrainState(inherited_steps=before.optimizer_steps)

    @property
    def completion(self) -> str | None:
        """Why the run needs no further step, or None."""
        return completion(self.config, self.state)

    def run(
        self,
        stream: Iterator[RankBatch],
        metrics: MetricsWriter | None,
        stop: StopRequest,
        show: Callable[[int], None] | None = None,
    ) -> bool:
        """Train until there is a `completion`; returns False if asked to stop before. A checkpoint is left either way.

        Args:
            stream: batches from `state.samples_consumed` on.
            metrics: rank 0's writer, from `state.step` on; None elsewhere.
            show: called with the step after each evaluation, on every rank: pictures and texts beside its numbers.

        Raises:
            UserError: loss or gradient were infinite or NaN too often in a row, or a checkpoint could not be written.
        """
        self.metrics, self.show = metrics, show
        self.engine.train()
        if self.average:
            self.average.begin()
        self._began = time.monotonic() - self.state.seconds
        self.outcomes.begin(self.state)
        for callback in self.callbacks:
            callback.on_start(self._view())
        if not self.completion:  # what comes next may take minutes without a word
            first = "an evaluation first, then " if self.state.step == 0 and self.evaluate else ""
            every = "step" if self.train.log_every_steps == 1 else f"{self.train.log_every_steps} steps"
            self.console.say(f"training from step {self.state.step}: {first}a line every {every}")
        self._evaluate_if_due()
        self.throughput.reset()
        while not (self.completion or self._stop_agreed or self.checkpoints.must_end):
            self.profiler.before(self.state.step)
            self._advance(stream, stop)
            self.profiler.after(self.state.step - 1)
            for callback in self.callbacks:
                callback.on_step(self._view())
            ended = ending(self.train, self.state) is not None
            if self.state.step % self.train.log_every_steps == 0 or ended:
                self._log()
            best = self._evaluate_if_due()
            self._save_if_due(best and self.config.evaluation.keep_best)
        self.profiler.close()
        self._save()
        with self._not_training("save"):
            proven = self.completion and not self.outcomes.skipped_in_a_row
            self._finish_saving(self.state.best_step if proven else None)
        for callback in self.callbacks:
            callback.on_end(self._view(), self.completion is not None)
        return self.completion is not None

    def _view(self) -> RunView:
        return RunView(self.engine.module, self.device, self.environment.rank, self.environment.world_size, self.state)

    def _advance(self, stream: Iterator[RankBatch], stop: StopRequest) -> None:
        """One optimizer step."""
        self.heartbeat.beat(self.state.step, "data")
        began = time.perf_counter()
        batch = next(stream)
        self.throughput.wait(time.perf_counter() - began)

        self.heartbeat.beat(self.state.step, "collective")
        seconds = time.monotonic() - self._began if self.environment.is_main else 0.0
        counts = [
            *self.objective.counts(batch.micro_batches),
            batch.num_tokens,
            stop.wanted,
            self.checkpoints.votes(),
            seconds,
        ]
        totals = distributed.reduce_sum(numbers_on(self.device, *counts))
        # Asked for before this step's work is queued, so that the host waits no longer than for the step before.
        shared = distributed.HostCopy(totals[-4:])

        self.throughput.passes.start()
        self._set_rate()
        every = self.config.monitor.inspect_every_steps
        inspect = bool(every) and (self.state.step + 1) % every == 0 and not self.profiler.running
        sums = torch.zeros(self._num_sums, dtype=torch.float64, device=self.device)
        with weight_copies(self.engine):
            seen = self._show_batch(batch, totals[:-4]) if self.objective.whole_batch else None
            for micro_step, micro_batch in enumerate(batch.micro_batches):
                last = micro_step == len(batch.micro_batches) - 1
                # Set explicitly, as DeepSpeed counts micro-batches, whose number grows with the batch.
                self.engine.set_gradient_accumulation_boundary(last)
                with self.inspector.watch() if inspect and last else contextlib.nullcontext():
                    if batch.sources is not None:
                        micro_batch = micro_batch | {_SOURCES: batch.sources[micro_step]}
                    sums += self._accumulate(micro_step, micro_batch, totals[:-4], seen)

        skipped = step_skipped(self.engine)
        if self.average:
            self.average.update(self.state.step + 1, skipped)
        share = 1 / self.environment.world_size
        # A skipped step counts its tokens; its losses, which may be NaN, are left out.
        self.outcomes.window += torch.cat(
            [
                torch.where(skipped > 0, 0.0, sums),
                (1 - skipped) * share,
                skipped * share,
                numbers_on(self.device, batch.num_tokens, batch.num_padding),
            ]
        )
        self.throughput.add(batch.num_tokens)
        outcome = distributed.HostCopy(skipped)
        tokens, *agreed = shared.take()
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            epoch=batch.epoch,
            samples_consumed=batch.position + batch.num_samples,
            tokens=self.state.tokens + int(tokens),
        )
        self.outcomes.add(outcome, self.state, batch.position)
        self._act_on(*agreed)
        self._look_at_outcomes(leave=1)
        if inspect:
            self._look_at_outcomes()
            self._write(self.inspector.scalars(), progress=False)

    def _set_rate(self) -> None:
        """Set the learning rate of the step, by its number or by the time used; the state then says how much that is.

        A run with a time budget ends after the step that has seen it used up, so that its last rate is the schedule's
        last one.
        """
        at: float = self.state.step
        end: float = self.train.max_steps
        if self.train.budget_seconds is not None:
            at, end = self._seconds, self.train.budget_seconds
            self.state = replace(self.state, seconds=self._seconds)
        self._rate = self.train.peak_rate * multiplier(self.config.schedule, at, end, self.state.tokens)
        set_learning_rate(self.engine, self._rate)

    def _show_batch(self, batch: RankBatch, totals: torch.Tensor) -> Any:
        """Show the objective the outputs of all micro-batches, computed without gradients. A lone micro-batch need not
        be computed again: its output is returned, with its graph. Collective.
        """
        alone = len(batch.micro_batches) == 1
        outputs = []
        with torch.set_grad_enabled(alone):
            for micro_step, micro_batch in enumerate(batch.micro_batches):
                self.heartbeat.beat(self.state.step, "compute")
                outputs.append(self._forward(micro_step, to_device(micro_batch, self.device)))
        self.throughput.passes.stop()  # the ranks meet here
        self.heartbeat.beat(self.state.step, "collective")
        assert isinstance(self.objective, WholeBatchObjective), "whole_batch says so"
        self.objective.see(outputs, totals)
        self.throughput.passes.start()
        return outputs[0] if alone else None

    def _forward(self, micro_step: int, micro_batch: dict) -> Any:
        """The model's output for a micro-batch on the device: the same however often, by the key of its dropout."""
        key = dropout_seed(self.config.seed, self.state.step, micro_step, self.environment.rank)
        more = {"step_seed": dropout_seed(self.config.seed, self.state.step)} if self.objective.STEP_SEED else {}
        return self.engine(**micro_batch, dropout_seed=key, **more)

    def _accumulate(self, micro_step: int, micro_batch: dict, totals: torch.Tensor, seen: Any = None) -> torch.Tensor:
        """Forward (unless its output was `seen` already) and backward of a micro-batch, and the update after the last
        one; returns the objective's sums, and those of the sources."""
        self.heartbeat.beat(self.state.step, "compute")
        self.throughput.flops += self.flops(micro_batch)
        micro_batch = to_device(micro_batch, self.device)
        sources = micro_batch.pop(_SOURCES, None)  # came in the same copy, and is none of the model's business
        output = self._forward(micro_step, micro_batch) if seen is None else seen
        loss, sums = self.objective(output, micro_batch, totals)
        if sources is not None:
            assert self.sources is not None, "batches of a mixture come with what measures its sources"
            sums = torch.cat([sums, self.sources.sums(output, micro_batch, sources)])
        # DeepSpeed averages gradients over ranks; times the world size, the average is the global sum. A loss that is
        # infinite or NaN makes the gradient NaN, whatever it was: so all ranks skip the step, and none need ask.
        # (0 times what is not finite is NaN: two kernels, where asking and filling takes eight.)
        share = loss.detach() * 0 + self.environment.world_size
        if self.engine.is_gradient_accumulation_boundary():  # in whose backward the ranks meet
            self.throughput.passes.stop()
        self.engine.backward(loss * share, scale_wrt_gas=False)
        self.engine.step()
        return sums

    def _act_on(self, stops: float, votes: float, seconds: float) -> None:
        """Act on what all ranks know since this step began: wishes to stop, votes for publishing a checkpoint, rank 0's
        clock.
        """
        self._stop_agreed |= stops > 0
        self._seconds = seconds
        if votes >= self.environment.world_size:
            with self._not_training("save"):
                self.checkpoints.publish()

    def _look_at_outcomes(self, leave: int = 0) -> None:
        """Learn which of the steps done were skipped; too many in a row end the run.

        Args:
            leave: newest steps left for later (Outcomes.look).
        """
        self.state, failed = self.outcomes.look(self.state, leave)
        if failed:
            self._give_up(failed)

    def _report_skip(self, step: Step) -> None:
        self.console.warn(f"loss or gradient of {step} are infinite or NaN; the step changes nothing")

    def _finish_saving(self, best: int | None) -> None:
        self.checkpoints.finish(best, partial(self.heartbeat.beat, self.state.step, "save"))

    def _give_up(self, last: Step) -> None:
        """Leave a checkpoint of the last good state and end the run."""
        self._save()
        self._finish_saving(None)
        kept = ", ".join(map(str, self.checkpoints.steps()))
        raise UserError(
            f"train.learning_rate: found {self.train.max_skipped_steps} steps in a row whose loss or gradient are "
            f"infinite or NaN, the last being {last}, expected fewer (train.max_skipped_steps); lower the "
            f"rate, lengthen the warmup or look at the data; checkpoints are there of steps {kept}: remove those that "
            "are too late to continue from"
        )

    def _evaluate_if_due(self) -> bool:
        """Whether an evaluation was due and was the best so far."""
        step, every = self.state.step, self.config.evaluation.every_steps
        ended = ending(self.train, self.state)
        due = step == 0 or ended or (every and step % every == 0)
        if not due or self.evaluate is None or self.state.evaluated_step == step:
            return False
        self._look_at_outcomes()
        if self._stop_agreed and not ended:
            return False  # a stop leaves little time: the resume evaluates first
        with self._not_training("evaluate"):
            beat = partial(self.heartbeat.beat, step, "evaluate")
            measured = self.evaluate(beat)
            if self.average:
                with self.average.in_place():
                    measured |= {f"ema_{name}": value for name, value in self.evaluate(beat).items()}
            scalars = {f"validation/{name}": value for name, value in measured.items()}
            scalars = self._as_measured_by_main(with_more(self.callbacks, "on_evaluation", self._view(), scalars))
            self._write(scalars)
            if self.show is not None:
                self.show(step)
        good_step = self.outcomes.good[0].step  # the weights are still those, if steps have been skipped since
        self.state = evaluated(self.config.evaluation, replace(self.state, evaluated_step=step), scalars, good_step)
        self.outcomes.changed(self.state)
        return self.state.best_step == good_step

    def _as_measured_by_main(self, scalars: dict[str, float]) -> dict[str, float]:
        """The scalars of an evaluation with rank 0's value of `evaluation.metric`. Collective.

        What ours measure is the same on all ranks; a callback's may not be, by a rounding or more, and what it decides
        (a save, the end of the run) all have to do together.
        """
        name = f"validation/{self.config.evaluation.metric}"
        if not self.callbacks:
            return scalars
        value = distributed.from_main(scalars.get(name, math.nan), self.device)
        return scalars | {name: value} if name in scalars else scalars

    def _log(self) -> None:
        self._look_at_outcomes()
        *sums, steps, _, tokens, padding = distributed.reduce_sum(self.outcomes.window.clone()).tolist()
        self.outcomes.window.zero_()
        self.outcomes.changed(self.state)
        scalars = {}
        if steps > 0.5:  # whole numbers but for rounding; without a good step there is no loss
            scalars["train/loss"] = sums[0] / steps
            own = len(self.objective.NAMES)
            scalars |= {f"train/{name}": value for name, value in self.objective.scalars(sums[:own]).items()}
            if self.sources:
                scalars |= {f"train/{name}": value for name, value in self.sources.scalars(sums[own:]).items()}
        scalars["train/learning_rate"] = self._rate
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        if math.isfinite(norm):  # a skipped step has none
            scalars["train/gradient_norm"] = norm
        scalars["train/skipped_steps"] = self.state.skipped_steps
        if self.engine.fp16_enabled():
            scalars["train/loss_scale"] = float(self.engine.optimizer.loss_scale)
        scalars["data/padding_share"] = padding / (tokens + padding)
        scalars["data/tokens"] = self.state.tokens
        scalars["data/samples"] = self.state.samples_consumed
        scalars["data/epoch"] = self.state.epoch
        if self.sources:
            found = self.sources.progress(self.state.samples_consumed)
            scalars |= {f"data/{name}": value for name, value in found.items()}
        scalars |= self.throughput.scalars()
        self._report_slow_rank()
        if scalars.get("speed/mfu", 0.0) > 1:
            scalars |= self._believable(scalars.pop("speed/mfu"))
        self._write(with_more(self.callbacks, "on_log", self._view(), scalars))
        if self.metrics:
            runs.set_status(Path(self.config.output), "running", self.state.step)
        self.throughput.reset()

    def _report_slow_rank(self) -> None:
        """Name, once, a rank that was far slower than the others in all lines of metrics for `monitor.hang_seconds`."""
        slow, now = self.throughput.slow, time.monotonic()
        if slow is None or slow[0] != self._slow_since[0]:
            self._slow_since = (slow[0], now) if slow else (-1, math.inf)
            return
        rank, seconds, median = slow
        lasted = now - self._slow_since[1]
        if lasted >= self.config.monitor.hang_seconds and rank not in self._told_slow:
            self._told_slow.add(rank)
            self.console.warn(
                f"{self.heartbeat.place(rank)} is slow: for {lasted:.0f} s it has taken {seconds:.3g} s "
                f"a step for its data and its passes, where half of the ranks take at most {median:.3g}; "
                "all wait for it"
            )

    def _believable(self, mfu: float) -> dict[str, float]:
        """What of a share above 1 can be shown: none, or its share of the peaks that are measured anew, once a run,
        since the first ones were wrong. Collective: all ranks have the same share."""
        if self._peak_doubted:
            return {}
        self._peak_doubted = True
        self.console.warn(f"speed/mfu: {mfu:.0%} of the peak is impossible and not shown: {peak_warning(self.device)}")
        before = self.throughput.peak or 0.0
        # None of a device with a data sheet, which not every rank needs to have.
        found = measured_anew(self.device, compute_dtype(self.engine), self.environment.is_main)
        self.throughput.peak = max(before, found or 0.0)
        old, new = distributed.reduce_sum(numbers_on(self.device, before, self.throughput.peak)).tolist()
        mfu *= old / new
        return {"speed/mfu": mfu} if mfu <= 1 else {}

    @contextlib.contextmanager
    def _not_training(self, phase: str) -> Iterator[None]:
        self.heartbeat.beat(self.state.step, phase)
        began = time.perf_counter()
        yield
        self.throughput.exclude(time.perf_counter() - began, phase)
        self.heartbeat.beat(self.state.step, "data")

    def _write(self, scalars: dict[str, float], progress: bool = True) -> None:
        if self.metrics:
            scalars = self.metrics.write(self.state.step, scalars)
        if progress:
            budget = self.train.budget_seconds
            self.console.progress(
                self.state.step, self.train.max_steps, scalars, None if budget is None else budget - self.state.seconds
            )

    def _save_if_due(self, is_kept: bool) -> None:
        """is_kept: whether a checkpoint of this step is wanted by its evaluation."""
        step, every, local = self.state.step, self.config.checkpoint.every_steps, self.config.checkpoint.local
        if is_kept or (every and step % every == 0):
            self._save()
        elif local and step % local == 0:
            self._save(local=True)

    def _save(self, local: bool = False) -> None:
        """Begin to save the state after the last good step; what was skipped since is tried again from there.

        local: as CheckpointManager.save.
        """
        self._look_at_outcomes()
        state, window = self.outcomes.good
        if self.outcomes.saved == state:  # not by the step: an evaluation after a resume changes the state
            return
        with self._not_training("save"):
            if not self.outcomes.skipped_in_a_row:
                self.checkpoints.retire(state.best_step)
            tracked = self.metrics.tracked() if self.metrics else {}
            facts = self.facts | ({_TRACKERS: tracked} if tracked else {})
            self.checkpoints.save(
                self.engine,
                state,
                facts,
                {"window": window.cpu()},
                self.average.files(self.environment.rank) if self.average else {},
                local=local,
            )
            if not self.config.checkpoint.asynchronous:
                self.checkpoints.publish()
        self.outcomes.saved = state
