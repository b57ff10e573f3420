"""The training loop: advance, log, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from launch import distributed
from launch.checkpoint import CheckpointManager, TrainState
from launch.config import CheckpointConfig, ScheduleConfig, TrainConfig
from launch.console import Console
from launch.engine import set_learning_rate
from launch.environment import Environment
from launch.metrics import MetricsWriter
from launch.preemption import StopRequest
from launch.schedules import multiplier
from launch.throughput import Throughput, peak_flops
from pipeline.batches import RankBatch
from pipeline.errors import UserError

# What the window counts beside the objective's own sums: steps, real tokens, tokens that padding would have added.
_WINDOW = ("steps", "tokens", "padding")


def dropout_seed(*key: int) -> int:
    """A seed for (seed, step, micro-step, rank): neighbouring keys give unrelated seeds, 0 to 2^63 - 1."""
    digest = hashlib.blake2b(b"".join(part.to_bytes(8, "little") for part in key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def to_device(batch: dict, device: torch.device) -> dict:
    """Tensors to the device, without waiting for the copy on a GPU; plain numbers stay."""
    if device.type == "cpu":
        return batch
    return {
        name: value.pin_memory().to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


class Trainer:
    """Trains one engine on one stream of batches, the same way on one process and on many.

    Args:
        engine: DeepSpeed's.
        objective: see launch/objectives.py.
        evaluation: makes an iterator of micro-batches, as many on every rank; None: no validation data.
        flops: model FLOPs of a micro-batch.
        facts: plain values kept in every checkpoint.
    """

    def __init__(self, *, engine, objective,
                 evaluation: Callable[[], Iterable[dict]] | None, flops: Callable[[dict], float], train: TrainConfig,
                 schedule: ScheduleConfig, checkpoint: CheckpointConfig, checkpoints: CheckpointManager,
                 console: Console, environment: Environment, device: torch.device,
                 seed: int, facts: dict) -> None:
        self.engine, self.objective = engine, objective
        self.evaluation, self.flops = evaluation, flops
        self.train, self.schedule, self.checkpoint = train, schedule, checkpoint
        self.checkpoints, self.console = checkpoints, console
        self.metrics: MetricsWriter | None = None
        self.environment, self.device, self.seed, self.facts = environment, device, seed, facts
        self.state = TrainState()
        self.throughput = Throughput()
        self._window = torch.zeros(len(objective.NAMES) + len(_WINDOW), dtype=torch.float64, device=device)
        self._stop_agreed = distributed.AgreedFlag(device)
        self._rate = 0.0
        self._saved_step: int | None = None

    def resume(self, step: int) -> None:
        """Go on from a published checkpoint of this run."""
        self.state, rank_states = self.checkpoints.load(self.engine, step)
        for saved in rank_states:
            self._window += saved["window"].to(self.device)
        self._saved_step = step

    def run(self, stream: Iterator[RankBatch], metrics: MetricsWriter | None, stop: StopRequest) -> bool:
        """Train until train.max_steps; returns False if asked to stop before. A checkpoint is left either way.

        Args:
            stream: batches from `state.samples_consumed` on.
            metrics: rank 0's writer, from `state.step` on; None elsewhere.
        """
        self.metrics = metrics
        self.engine.train()
        self._evaluate_if_due()
        self.throughput.reset()
        stopping = False
        while self.state.step < self.train.max_steps and not stopping:
            stopping = self._advance(stream, stop)
            if self.state.step % self.train.log_every_steps == 0 or self.state.step == self.train.max_steps:
                self._log()
            # A stop leaves little time: what is due then is evaluated after the resume, if there will be one.
            if not stopping or self.state.step == self.train.max_steps:
                self._evaluate_if_due()
            every = self.checkpoint.every_steps
            if every and self.state.step % every == 0:
                self._save()
        self._save()
        return self.state.step == self.train.max_steps

    def _advance(self, stream: Iterator[RankBatch], stop: StopRequest) -> bool:
        """One optimizer step; True if all ranks have agreed to stop after it."""
        began = time.perf_counter()
        batch = next(stream)
        self.throughput.wait(time.perf_counter() - began)

        counts = torch.tensor([*self.objective.counts(batch), stop.received is not None], dtype=torch.float64)
        totals = distributed.reduce_sum(counts.to(self.device, non_blocking=True))
        stop_now = self._stop_agreed.read()
        self._stop_agreed.post(totals[-1:])

        self._rate = self.train.learning_rate * multiplier(self.schedule, self.state.step, self.train.max_steps)
        set_learning_rate(self.engine, self._rate)
        sums = torch.zeros(len(self.objective.NAMES), dtype=torch.float64, device=self.device)
        flops = 0.0
        for micro_step, micro_batch in enumerate(batch.micro_batches):
            flops += self.flops(micro_batch)
            key = dropout_seed(self.seed, self.state.step, micro_step, self.environment.rank)
            micro_batch = to_device(micro_batch, self.device)
            output = self.engine(**micro_batch, dropout_seed=key)
            loss, part = self.objective(output, micro_batch, totals[:-1])
            # DeepSpeed averages gradients over ranks; times the world size, the average is the global sum.
            self.engine.backward(loss * self.environment.world_size, scale_wrt_gas=False)
            self.engine.step()
            sums += part
        own = torch.tensor([1 / self.environment.world_size, batch.num_tokens, batch.num_padding], dtype=torch.float64)
        self._window += torch.cat([sums, own.to(self.device, non_blocking=True)])
        self.throughput.add(batch.num_tokens, flops)
        self.state = replace(self.state, step=self.state.step + 1, epoch=batch.epoch,
                             samples_consumed=batch.position + batch.num_samples)
        return stop_now

    def _evaluate_if_due(self) -> None:
        step, every = self.state.step, self.train.evaluate_every_steps
        due = step in (0, self.train.max_steps) or (every and step % every == 0)
        if due and self.evaluation is not None and self.state.evaluated_step != step:
            with self._not_training():
                self._evaluate()
            self.state = replace(self.state, evaluated_step=step)

    def _log(self) -> None:
        *sums, steps, tokens, padding = distributed.reduce_sum(self._window.clone()).tolist()
        self.state = replace(self.state, tokens=self.state.tokens + round(tokens))
        self._window.zero_()
        loss = sums[0] / steps
        self._refuse_infinite(loss)
        scalars = {"train/loss": loss}
        scalars |= {f"train/{name}": value for name, value in self.objective.scalars(sums).items()}
        scalars["train/learning_rate"] = self._rate
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        if math.isfinite(norm):  # an fp16 step that overflowed and was skipped has none
            scalars["train/gradient_norm"] = norm
        scalars["data/padding_share"] = padding / (tokens + padding)
        scalars["data/tokens"] = self.state.tokens
        scalars["data/samples"] = self.state.samples_consumed
        scalars["data/epoch"] = self.state.epoch
        scalars |= self._speed()
        self._write(scalars)
        self.throughput.reset()

    def _refuse_infinite(self, loss: float) -> None:
        if not math.isfinite(loss):
            kept = self.checkpoints.steps()
            raise UserError(
                f"train.learning_rate: found a loss of {loss} at step {self.state.step}, expected a finite one; lower "
                "the rate or lengthen the warmup; the newest checkpoint is of "
                + (f"step {kept[-1]}" if kept else "no step yet")
            )

    def _speed(self) -> dict[str, float]:
        mine = self.throughput
        measured = torch.tensor([mine.tokens, mine.flops, mine.seconds, mine.data_wait_share], dtype=torch.float64)
        tokens, flops, seconds, wait = distributed.reduce_sum(measured.to(self.device)).tolist()
        seconds, wait = seconds / self.environment.world_size, wait / self.environment.world_size
        scalars = {"speed/tokens_per_second": tokens / seconds, "speed/data_wait_share": wait}
        peak = peak_flops(self.device)
        if peak:
            scalars["speed/mfu"] = flops / seconds / (peak * self.environment.world_size)
        return scalars

    @contextlib.contextmanager
    def _not_training(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.throughput.exclude(time.perf_counter() - began)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.engine.eval()
        sums = torch.zeros(len(self.objective.NAMES), dtype=torch.float64, device=self.device)
        # The loss of a part needs the whole's counts, which only the end knows: means come from the sums.
        ones = torch.ones(2, dtype=torch.float64, device=self.device)
        for micro_batch in self.evaluation():
            micro_batch = to_device(micro_batch, self.device)
            sums += self.objective(self.engine(**micro_batch), micro_batch, ones)[1]
        self.engine.train()
        means = self.objective.scalars(distributed.reduce_sum(sums).tolist())
        scalars = {"validation/loss": sum(value for name, value in means.items() if name.endswith("_loss"))}
        scalars |= {f"validation/{name}": value for name, value in means.items()}
        self._write(scalars)

    def _write(self, scalars: dict[str, float]) -> None:
        if self.metrics:
            self.metrics.write(self.state.step, scalars)
        self.console.progress(self.state.step, self.train.max_steps, scalars)

    def _save(self) -> None:
        if self._saved_step == self.state.step:
            return
        with self._not_training():
            # A checkpoint of a model that is lost would push out the good ones. The last gradient tells of weights
            # that no loss has seen yet; an fp16 step that overflowed was skipped and changed none.
            seen = distributed.reduce_sum(self._window[:1].clone()).item()
            if not self.engine.fp16_enabled():
                seen += float(self.engine.get_global_grad_norm() or 0.0)
            self._refuse_infinite(seen)
            self.checkpoints.save(self.engine, self.state, self.facts, {"window": self._window.cpu()})
        self._saved_step = self.state.step
