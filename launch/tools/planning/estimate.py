"""Memory, time and traffic of a step, from a run's configuration, its lengths and a machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from cloze.launch.config import BatchArithmetic, PretrainConfig
from cloze.launch.config.training import divisors
from cloze.launch.engine.division import Division
from cloze.launch.engine.optimizers import build_optimizer, matrix_rows, parameter_groups
from cloze.launch.engine.summing import BUCKET_BYTES, buckets_of
from cloze.launch.pretrain.micro_batch_size import MASKED_MARGIN, SPARE_SHARE
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.system.memory import GIB
from cloze.launch.tools.planning import assumptions
from cloze.launch.tools.planning.assumptions import (
    COLLECTIVE,
    COLLECTIVE_PROCESSORS,
    COLLECTIVE_SECONDS,
    PESSIMISTIC_PRODUCTS,
)
from cloze.launch.tools.planning.machines import Machine
from cloze.launch.tools.planning.memory import MemoryEstimate, divided_memory, memory, traffic, weights_are_16_bit
from cloze.launch.tools.planning.roofline import Cost, cost, kernel_seconds
from cloze.launch.tools.planning.trace import ModelRun, Trace, TracedBatch, kernel_of, trace_micro_step, trace_optimizer
from cloze.pipeline.errors import UserError

_SEQUENCES = 1024  # number of sequences from whose lengths FLOPs are computed
# Micro-batches from which the memory of others is extrapolated, and the share of a GPU's memory by which it must then
# differ from what there is to be beyond doubt: several times its error, 2% of BERT's activations at 128 tokens.
_EXTRAPOLATED_FROM = 64, 256
_CLEAR = 0.1


@dataclass(frozen=True)
class Lengths:
    """Lengths and masked share of a run's sequences."""

    histogram: tuple[float, ...]
    """Share of the sequences of each length; index: tokens."""
    masked_share: float
    """Share of the tokens that are predicted."""
    next_tokens: float = 0.0
    """Share of the samples of which every token is predicted instead."""

    @classmethod
    def of_procedure(cls, longest: int, short_share: float, masked_share: float) -> Lengths:
        """Lengths by BERT's procedure: full sequences, and a share with uniformly distributed lengths of 1 to `longest`
        tokens.
        """
        shares = [0.0] + [short_share / longest] * longest
        shares[longest] += 1 - short_share
        return cls(tuple(shares), masked_share)

    @property
    def longest(self) -> int:
        return max(length for length, share in enumerate(self.histogram) if share)

    @cached_property
    def mean(self) -> float:
        """Mean tokens per sequence."""
        return sum(length * share for length, share in enumerate(self.histogram)) / sum(self.histogram)

    def typical(self, count: int) -> TracedBatch:
        """`count` sequences with the distribution of lengths: quantiles in the middle of equal parts."""
        total, lengths, seen, length = sum(self.histogram), [], 0.0, -1
        for place in range(count):
            while seen < (place + 0.5) / count * total and length < len(self.histogram) - 1:
                length += 1
                seen += self.histogram[length]
            lengths.append(max(1, length))
        predicted = self.next_tokens + (1 - self.next_tokens) * self.masked_share
        return TracedBatch(tuple(lengths), max(1, round(predicted * sum(lengths))))

    def largest(self, count: int) -> TracedBatch:
        """`count` sequences of maximum length, as `micro_batch_size: auto` tries."""
        masked = min(self.longest, math.ceil(MASKED_MARGIN * self.longest * self.masked_share))
        return TracedBatch((self.longest,) * count, (self.longest if self.next_tokens else masked) * count)


@dataclass(frozen=True)
class Cluster:
    """Number of processes and their links."""

    machine: Machine
    processes: int
    a_machine: int
    """Devices of a machine, of whose processes there may be fewer."""
    network: float
    """Bytes/s of each process to other machines, in one direction."""

    def collective_seconds(self, sent: float, count: int) -> float:
        """Time of `count` collectives in which each process sends `sent` bytes.

        Rings pass all devices of a machine before they leave it, each through another device's network card: a machine
        sends to the next as much as a device to its neighbour, over all of its cards.
        """
        inside = self.processes <= self.a_machine
        rate = self.machine.link if inside else min(self.network * self.a_machine, self.machine.link)
        rounds = math.ceil(math.log2(self.processes)) if self.processes > 1 else 0
        return sent / (rate * COLLECTIVE) + count * rounds * COLLECTIVE_SECONDS


def most_with_half(estimator: Estimator, stage: int) -> int:
    """The largest number of GPUs, of those that divide the batch, of which each still reaches half of the MFU of one
    alone.
    """
    counts = divisors(estimator.config.train.common_size)
    best = estimator.on(1).best_mfu(stage)
    place = bisect_left(counts, True, key=lambda gpus: estimator.on(gpus).best_mfu(stage) < best / 2)
    return counts[max(0, place - 1)]


def waited_for(sums: Sequence[float], parts: Sequence[float], backward: float) -> float:
    """Seconds by which the sums of gradients that start during the last backward make a step longer.

    Each sum starts when its gradients are complete and the previous sum has ended. Beside backward it takes some of the
    GPU's processors from it.

    Args:
        sums: seconds of each sum.
        parts: for each sum, the share of backward (0 to 1) that is done when its gradients are complete.
        backward: seconds of the last backward.
    """
    ended = 0.0
    for seconds, part in zip(sums, parts, strict=True):
        ended = max(ended, part * backward) + seconds
    left = max(0.0, ended - backward)
    return left + COLLECTIVE_PROCESSORS * (sum(sums) - left)


@dataclass(frozen=True)
class StepEstimate:
    """Times in seconds and counts of one optimizer step of one process; its memory is `Estimator.memory`."""

    batch: BatchArithmetic
    micro: Cost
    """Forward and backward of one micro-batch."""
    optimizer: Cost
    gradient_seconds: float
    """Passes over the gradients, their norm, clipping, copies for their sum, and the 16-bit copies of the weights."""
    communication_seconds: float
    waiting_seconds: float
    """Communication that makes the step longer; the rest runs beside backward."""
    straggling_seconds: float
    """Waiting for the rank with most tokens."""
    hooks_seconds: float
    """Hooks of gradients, less the time by which the host is ahead of the device, and the share of inspected steps."""
    seconds: float
    tokens: float
    """Tokens of all processes."""
    flops: float
    """Model FLOPs of all processes."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Divided:
    """The largest shares of the processes among whom an optimizer's work is divided by whole tensors."""

    slowest: Trace
    """The step of the process whose share costs most."""
    parameters: int
    """Parameters of the process that has most."""
    states: int
    """Bytes of its optimizer states and its part of the average."""


# Cached attributes of an Estimator that are the same on every cluster; traces are keyed by the objective among them.
_OF_THE_RUN = "objective", "_gradients", "parameters", "frozen_parameters", "flops_of_sequence", "_optimizer"


@dataclass(frozen=True)
class Estimator:
    """Estimates steps of one configuration on one cluster."""

    config: PretrainConfig
    lengths: Lengths
    cluster: Cluster
    tell: Callable[[str], None] = lambda text: None
    """Called with what is traced next, which takes seconds."""
    traces: dict[tuple[ModelRun, TracedBatch], Trace] = field(default_factory=dict, repr=False, compare=False)
    """Traces of micro-steps, which are the same on every cluster."""

    def traced(self, stage: int, batch: TracedBatch) -> Trace:
        """A micro-step's trace."""
        wanted = self.run(stage), batch
        if wanted not in self.traces:
            size = f"{len(batch.lengths)} x up to {max(batch.lengths)} tokens"
            self.tell(f"trace {len(self.traces) + 1}, ZeRO stage {stage}, a micro-batch of {size}")
            self.traces[wanted] = trace_micro_step(*wanted)
        return self.traces[wanted]

    def run(self, stage: int) -> ModelRun:
        """The ModelRun at a ZeRO stage."""
        train, machine = self.config.train, self.cluster.machine
        halved = self._halved(stage)
        dtype = {"fp16": torch.float16, "fp32": None}.get(train.precision, torch.bfloat16)
        return ModelRun(
            self.config.model,
            on_gpu=not machine.is_cpu,
            has_flash=machine.has_flash,
            attention_kernel=train.attention_kernel,
            gradient_checkpointing=train.gradient_checkpointing,
            weights=dtype if halved and dtype else torch.float32,
            autocast=None if halved else dtype,
            objective=self.objective,
        )

    def _sharding(self, stage: int) -> int:
        """The stage at which DeepSpeed cuts tensors into parts, as `RunConfig.sharding_stage`."""
        return 0 if self.config.optimizer.whole_tensors else stage

    def _divides(self, stage: int) -> bool:
        """Whether whole tensors are divided among the processes (launch/engine/division.py)."""
        return stage > self._sharding(stage)

    def _halved(self, stage: int) -> bool:
        return weights_are_16_bit(self.config.train.precision, self._sharding(stage))

    @cached_property
    def objective(self) -> Objective:
        """The objective; a teacher is loaded."""
        return make_objective(self.config)

    @cached_property
    def parameters(self) -> int:
        """Number of trained parameters, shared ones counted once."""
        return sum(self.buckets)

    @cached_property
    def _gradients(self) -> list[list[int]]:
        """Number of elements of each gradient in each bucket of stage 0, in the order in which the buckets are sent."""
        objective = self.objective  # which loads a teacher: not there
        with torch.device("meta"):
            parameters = list(objective.build_model().parameters())
        return [[each.numel() for each in bucket] for bucket in reversed(buckets_of(parameters, BUCKET_BYTES))]

    @property
    def buckets(self) -> list[int]:
        """Number of elements in each bucket of stage 0."""
        return [sum(sizes) for sizes in self._gradients]

    @cached_property
    def frozen_parameters(self) -> int:
        """Number of parameters of models that are not trained, such as a teacher."""
        return sum(parameter.numel() for model in self.objective.frozen for parameter in model.parameters())

    @cached_property
    def flops_of_sequence(self) -> float:
        """Model FLOPs of a sequence, forward and backward, as the objective counts them: the mean of the run's
        lengths.
        """
        return self.objective.flops(self.lengths.typical(_SEQUENCES).counts) / _SEQUENCES

    @cached_property
    def _optimizer(self) -> tuple[Trace, int]:
        # DeepSpeed's kernel, which would be compiled here, moves what torch's fused one does.
        config = replace(self.config.optimizer, implementation="torch")
        return trace_optimizer(self.run(0), partial(build_optimizer, config=config, learning_rate=1e-3))

    @property
    def _average_bytes(self) -> int:
        """Bytes of the average for each parameter."""
        return 4 if self.config.ema.wanted else 0

    @property
    def _states(self) -> int:
        """Bytes of states of all parameters: the optimizer's, and the average."""
        return self._optimizer[1] + self._average_bytes * self.parameters

    @cached_property
    def _divided(self) -> Divided:
        config, processes = self.config.optimizer, self.cluster.processes
        on_gpu = not self.cluster.machine.is_cpu

        def division(model: torch.nn.Module, rank: int = 0) -> Division:
            rows = matrix_rows(model, config.matrices)
            return Division(model, parameter_groups(model, config), 1, rank, processes, on_gpu=on_gpu, rows=rows)

        def build(model: torch.nn.Module, rank: int) -> torch.optim.Optimizer:
            return build_optimizer(model, config, 1e-3, groups=division(model, rank).owned_groups)

        with torch.device("meta"):
            model = self.objective.build_model()
        of_all, costs, sizes = division(model), [0.0] * processes, [0] * processes
        parameters = dict(model.named_parameters())
        for name, owner in of_all.owners.items():
            costs[owner] += of_all.costs[name]
            sizes[owner] += parameters[name].numel()
        run, most = self.run(0), max(sizes)
        slowest, _ = trace_optimizer(run, partial(build, rank=costs.index(max(costs))))
        _, states = trace_optimizer(run, partial(build, rank=sizes.index(most)))
        return Divided(slowest, most, states + self._average_bytes * most)

    def memory(self, stage: int, micro_batch_size: int) -> MemoryEstimate:
        """Peak memory of a process, with sequences of maximum length."""
        trace = self.traced(stage, self.lengths.largest(micro_batch_size))
        zero, on_gpu = self.config.zero, not self.cluster.machine.is_cpu
        activations = trace.peak_bytes
        if self._divides(stage):
            batch = BatchArithmetic.of(
                replace(self.config.train, micro_batch_size=micro_batch_size), self.cluster.processes
            )
            needed = divided_memory(
                stage,
                self.parameters,
                self._divided.parameters,
                self.cluster.processes,
                activations,
                states=self._divided.states,
                accumulates=batch.gradient_accumulation_steps > 1,
                on_gpu=on_gpu,
            )
        else:
            needed = memory(
                stage,
                self.parameters,
                self.cluster.processes,
                activations,
                precision=self.config.train.precision,
                states=self._states,
                on_gpu=on_gpu,
                offload_optimizer=zero.offload_optimizer,
                offload_parameters=zero.offload_parameters,
            )
        width = 2 if self._halved(stage) else 4
        return replace(needed, weights=needed.weights + width * self.frozen_parameters)

    def checkpoint_bytes(self, stage: int) -> int:
        """fp32 weights and optimizer states of all processes; at stages 1 and 2 also the weights by which forward
        computes, in a file of their own."""
        computing = 0
        if self._sharding(stage) in (1, 2):
            computing = 2 if self._halved(stage) else 4
        return (4 + computing) * self.parameters + self._states

    def fits(self, needed: MemoryEstimate) -> bool:
        """Whether it leaves the same free share as `micro_batch_size: auto`."""
        return needed.total <= self.limit * (1 - SPARE_SHARE)

    @property
    def limit(self) -> float:
        """Memory in bytes that a process may use."""
        given = self.config.train.memory_limit_gib
        return self.cluster.machine.memory_bytes if given is None else given * GIB

    def largest_micro_batch(self, stage: int) -> int | None:
        """The largest micro-batch that fits, of the sizes that divide a process's share; None: not even one
        sequence.
        """
        return next((size for size in reversed(divisors(self._share)) if self.holds(stage, size)), None)

    @property
    def _share(self) -> int:
        """Sequences of a process in the smallest step, of one kind."""
        return self.config.train.common_size // self.cluster.processes

    def holds(self, stage: int, micro_batch_size: int) -> bool:
        """Whether a micro-batch fits, traced only where that is not clear from two others, which any number of GPUs
        shares.

        Memory is linear in the number of sequences, except for few of them, where it does not grow at first: what is
        extrapolated is then too low.
        """
        low, high = _EXTRAPOLATED_FROM
        if self._divides(stage):  # whose memory is that of a share of the batch
            low, high = min(low, self._share), min(high, self._share)
        if micro_batch_size <= low and self.fits(self.memory(stage, low)):
            return True
        if high > low:
            base, allowed = self.memory(stage, low).total, self.limit * (1 - SPARE_SHARE)
            slope = (self.memory(stage, high).total - base) / (high - low)
            expected = (base + slope * (micro_batch_size - low)) / allowed
            if expected > 1 + _CLEAR or (expected < 1 - _CLEAR and micro_batch_size > low):
                return expected < 1
        return self.fits(self.memory(stage, micro_batch_size))

    def step(self, stage: int, micro_batch_size: int) -> StepEstimate:
        """The estimate of a step with this micro-batch size."""
        train, machine = replace(self.config.train, micro_batch_size=micro_batch_size), self.cluster.machine
        batch = BatchArithmetic.of(train, self.cluster.processes)
        sequences = self.lengths.typical(batch.micro_batch_size)
        run = self.run(stage)
        trace = self.traced(stage, sequences)
        micro = cost(machine, trace, compiled=train.compiles(kernel_of(run), self._sharding(stage)))
        divided = self._divides(stage)
        optimizer = cost(machine, self._divided.slowest if divided else self._optimizer[0])
        if self._sharding(stage):  # its own share of the weights, in few flat tensors
            seconds = optimizer.device_seconds / self.cluster.processes
            optimizer = replace(optimizer, device_seconds=seconds, seconds=seconds)
        communication, waiting = self._communication(stage, batch, trace, micro)
        passes = (
            self._gradient_bytes(stage, batch) / machine.bandwidth + cost(machine, Trace(trace.once)).device_seconds
        )
        micro_steps = batch.gradient_accumulation_steps * micro.seconds
        straggling = micro_steps * self._straggling(batch)
        hooks = self._hooks(stage, micro)
        seconds = micro_steps + optimizer.seconds + passes + waiting + straggling + hooks
        tokens = train.global_batch_size * self.lengths.mean
        flops = train.global_batch_size * self.flops_of_sequence
        return StepEstimate(
            batch,
            micro,
            optimizer,
            passes,
            communication,
            waiting,
            straggling,
            hooks,
            seconds,
            tokens,
            flops,
        )

    def _straggling(self, batch: BatchArithmetic) -> float:
        """Share by which the rank with most tokens of a step takes longer than the mean."""
        if self.cluster.processes == 1 or self.lengths.mean == self.lengths.longest:
            return 0.0
        samples = batch.micro_batch_size * batch.gradient_accumulation_steps
        ranks = math.log(self.cluster.processes) / math.log(assumptions.STRAGGLERS_RANKS)
        return assumptions.STRAGGLERS * math.sqrt(assumptions.STRAGGLERS_SAMPLES / samples * ranks)

    def _hooks(self, stage: int, micro: Cost) -> float:
        """Seconds a step of the hooks by which gradients are summed in the last backward, of its exchange of counts,
        and of its share of inspected steps.
        """
        cluster, machine = self.cluster, self.cluster.machine
        if machine.is_cpu:
            return 0.0
        seconds, tensors = 0.0, sum(map(len, self._gradients))
        if cluster.processes > 1:
            seconds += cluster.collective_seconds(assumptions.COUNTS_BYTES, 1)
            ahead = micro.seconds - micro.host_seconds  # of the host, in a micro-step
            seconds += max(0.0, assumptions.HOOK_SECONDS * tensors - ahead)
        if every := self.config.monitor.inspect_every_steps:
            share = cluster.processes if stage else 1
            host = assumptions.INSPECTION_LAUNCHES * assumptions.HOST_SECONDS * tensors
            moved = assumptions.INSPECTION_BYTES * self.parameters / machine.bandwidth / share
            seconds += max(host, moved) / every
        return seconds

    def _communication(self, stage: int, batch: BatchArithmetic, trace: Trace, micro: Cost) -> tuple[float, float]:
        """Seconds of communication in a step, and the seconds by which it makes the step longer."""
        cluster = self.cluster
        if self._divides(stage):
            summed, waiting = self._communication(0, batch, trace, micro)
            times = batch.gradient_accumulation_steps if stage == 2 else 1
            sent, _ = traffic(0, self.parameters, cluster.processes, 1, precision="fp32")
            # New weights go the same way as gradients, when the optimizer is done (`Division.share`).
            shared = cluster.collective_seconds(sent, len(self.buckets)) if cluster.processes > 1 else 0.0
            return times * summed + shared, times * waiting + shared
        if stage or cluster.machine.is_cpu or cluster.processes == 1:
            sent, count = traffic(
                stage,
                self.parameters,
                cluster.processes,
                batch.gradient_accumulation_steps,
                precision=self.config.train.precision,
            )
            seconds = cluster.collective_seconds(sent, count)
            return seconds, seconds
        sums = [
            cluster.collective_seconds(traffic(0, size, cluster.processes, 1, precision="fp32")[0], 1)
            for size in self.buckets
        ]
        # The last bucket is complete at the end of backward, the others in proportion to their share of the weights.
        inner = sum(self.buckets[:-1])
        if self.config.objective == "replaced_tokens":  # the generator's come first and are complete late
            inner = 0
        parts = [done / inner if inner else 1.0 for done in accumulate(self.buckets[:-1])] + [1.0]
        by_kernel = [kernel_seconds(cluster.machine, kernel) for kernel in trace.kernels]
        backward = sum(by_kernel[trace.forward :]) / sum(by_kernel) * micro.seconds
        return sum(sums), waited_for(sums, parts, backward)

    def _gradient_bytes(self, stage: int, batch: BatchArithmetic) -> float:
        """Moved by the norm (read), clipping (read, written) and, of several processes, the copy of all gradients into
        buffers, their division and, from stage 1 on, the copy back.
        """
        if self._divides(stage):
            copies = 4 * 4 * self.parameters if self.cluster.processes > 1 else 0
            times = batch.gradient_accumulation_steps if stage == 2 else 1
            return (3 + 2 * times) * 4 * self._divided.parameters + times * copies
        size = 4 * self.parameters / (self.cluster.processes if stage else 1)
        return size * (3 + ((6 if stage else 4) if self.cluster.processes > 1 else 0))

    def stages(self) -> list[int]:
        """The ZeRO stages that the optimizer and the precision allow."""
        if self.config.optimizer.whole_tensors:
            return [0, 1, 2]
        return [stage for stage in range(4) if stage or self.config.train.precision != "fp16"]

    def micro_batch_size(self, stage: int) -> int:
        """The configured one, or for auto the largest.

        Raises:
            UserError: not even one sequence fits.
        """
        wished = self.config.train.micro_batch_size
        if isinstance(wished, int):
            return wished
        largest = self.largest_micro_batch(stage)
        if largest is None:
            needed = self.memory(stage, 1)
            raise UserError(
                f"plan: found {needed.total / GIB:.1f} GiB needed for one sequence at zero.stage {stage}, expected "
                f"at most {1 - SPARE_SHARE:.0%} of {self.limit / GIB:.1f} GiB; set train.gradient_checkpointing to "
                "all, raise zero.stage, or take a smaller model"
            )
        return largest

    def pessimistic(self) -> Estimator:
        """The same where products reach less of the peak (PESSIMISTIC_PRODUCTS); those of a CPU are measured."""
        machine = self.cluster.machine
        if machine.is_cpu:
            return self
        slower = replace(machine, best_product=min(machine.best_product, PESSIMISTIC_PRODUCTS))
        return self.changed(cluster=replace(self.cluster, machine=slower))

    def on(self, processes: int) -> Estimator:
        """The same for another number of processes."""
        return self.changed(cluster=replace(self.cluster, processes=processes))

    def changed(self, **changes: Any) -> Estimator:
        """The same on another cluster, or telling otherwise; what both have in common is not computed again."""
        other = replace(self, **changes)
        other.__dict__["objective"] = self.objective
        alike = ("_divided",) if other.cluster.processes == self.cluster.processes else ()
        other.__dict__.update({name: self.__dict__[name] for name in _OF_THE_RUN + alike if name in self.__dict__})
        return other

    def mfu(self, stage: int, micro_batch_size: int) -> float:
        """Share of the peak of all devices that the model's FLOPs take in a step."""
        step = self.step(stage, micro_batch_size)
        return step.flops / step.seconds / (self.cluster.machine.flops * self.cluster.processes)

    def best_mfu(self, stage: int) -> float:
        """MFU with the largest micro-batch; 0 if not even one sequence fits."""
        size = self.largest_micro_batch(stage)
        return 0.0 if size is None else self.mfu(stage, size)

    def seconds_of_run(self, step: StepEstimate) -> float:
        """Time of all steps with the full batch; with a time budget, the budget."""
        return self.config.train.budget_seconds or self.config.train.max_steps * step.seconds
