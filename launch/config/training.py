"""Configuration of the section `train`: steps, batch sizes, default rates, precision; batch arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Final, Literal, TypeAlias, TypeVar

from cloze.launch.config.changes_at_resume import FREE
from cloze.pipeline.bounds import MOST, MOST_SECONDS, bounds, check_bounds
from cloze.pipeline.errors import UserError

Train = TypeVar("Train", bound="TrainConfig")
_WHOLE = 1e-6  # share of a step by which causal_share may miss a whole number of samples: 0.333333 is a third
AUTO: Final = "auto"  # instead of a value: it is determined at the start
BATCH = bounds(at_least=1, at_most=1 << 24)  # LAMB's largest had 65,536 samples (arXiv 1904.00962)

Rates: TypeAlias = tuple[tuple[float, float], ...]
"""Parameters of the encoder's layers, ascending, and the rate of models of fewer."""

# With BERT's own 1e-4 (Devlin et al. 2019, A.2) small models learn little more than the frequencies of words in the
# number of steps that they usually get. 5e-4: ELECTRA-Small's (Clark et al. 2020, arXiv 2003.10555, appendix A); 1e-3
# and 2e-3: those of configs/pretrain/small.yaml and tiny.yaml; 2e-4: ELECTRA-Base's, for the sizes between them.
PRETRAINING: Rates = ((1_000_000, 2e-3), (5_000_000, 1e-3), (20_000_000, 5e-4), (60_000_000, 2e-4), (math.inf, 1e-4))
# With BERT's own 2e-5 to 5e-5 (Devlin et al. 2019, A.3) small models hardly change. 6e-4: two points above 3e-4 on
# STS-B and one on SICK with 3.5 million parameters, and as good on CoLA (docs/experiments.md). 3e-4: that of
# ELECTRA-Small with its 9.4 million (Clark et al. 2020, arXiv 2003.10555, appendix B), and the largest that Turc et al.
# 2019 (arXiv 1908.08962) tried for theirs; 1e-4: the next of these.
FINETUNING: Rates = ((8_000_000, 6e-4), (20_000_000, 3e-4), (60_000_000, 1e-4), (math.inf, 3e-5))


def peak_rate(rates: Rates, parameters: int) -> float:
    """The rate of a model with so many parameters in its encoder's layers."""
    return next(rate for limit, rate in rates if parameters < limit)


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


@dataclass(frozen=True)
class BatchPhase:
    """A global batch size for a part of the run, such as one with shorter sequences."""

    global_batch_size: int = field(metadata=BATCH)
    """Samples in one optimizer step over all processes; a multiple of the world size."""
    until_tokens: int
    """Tokens since the start of the run at which the phase ends, counted with the data's mean sample length."""


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batch sizes, learning rate and precision."""

    rates: ClassVar[Rates] = PRETRAINING

    max_steps: int = field(default=1000, metadata=bounds(at_least=1))
    """Optimizer steps of the whole run; with a time budget the maximum."""
    time_budget_hours: float | None = field(default=None, metadata=bounds(above=0))
    """Hours of training after which the run is complete: the schedule follows the clock; null: none."""
    global_batch_size: int = field(default=256, metadata=BATCH)
    """Samples in one optimizer step over all processes; a multiple of the world size."""
    initial_global_batch_size: int | None = field(default=None, metadata=BATCH)
    """Global batch size of the first steps, from which it grows; also a multiple of the world size; null: it does not
    grow."""
    batch_increment: int | None = field(default=None, metadata=bounds(at_least=1))
    """Samples added to the global batch at a time; also a multiple of the world size; null:
    initial_global_batch_size."""
    batch_warmup_tokens: int = field(default=0, metadata=bounds(at_least=0))
    """Tokens after which the global batch has its full size, counted with the data's mean sample length."""
    batch_phases: list[BatchPhase] = field(default_factory=list)
    """Other global batch sizes, in consecutive phases; after the last phase global_batch_size applies."""
    micro_batch_size: int | Literal["auto"] | None = field(default=None, metadata=FREE | bounds(at_least=1))
    """Maximum samples in one forward and backward pass of one process: the largest such divisor of its share of a batch
    is used, which does not change the gradient; auto: the most that fit, tried at the first start, on a CPU up to 32
    and only if memory could be short; null: auto on a GPU, 32 on a CPU."""
    sequence_length: int | None = field(default=None, metadata=FREE | bounds(at_least=1))
    """Longest sequence in tokens that the run accepts; shards with longer ones are refused; null: any."""
    memory_limit_gib: float | None = field(default=None, metadata=FREE | bounds(at_least=0))
    """GiB of memory that a process may use, for micro_batch_size: auto; null: all of the GPU, or the process's share of
    this machine."""
    learning_rate: float | Literal["auto"] = field(default=AUTO, metadata=bounds(above=0))
    """Peak learning rate; the schedule multiplies it. auto: by the number of parameters in the model's layers: 2e-3
    below 1 million (BERT-tiny), 1e-3 below 5 (mini), 5e-4 below 20 (small), 2e-4 below 60 (medium), else 1e-4."""
    precision: Literal["bf16", "fp16", "fp32", "autocast"] = "bf16"
    """Number format of the matrix products: bf16 and fp16 keep fp32 master weights; fp16 needs a GPU; autocast: bf16
    products with fp32 weights, at any zero.stage."""
    tf32: bool = False
    """Whether fp32 matrix products on a GPU round their inputs to TF32 (10-bit mantissa): several times as fast; only
    with precision fp32."""
    deterministic: bool = field(default=False, metadata=FREE)
    """Whether a GPU sums in the same order each time, so that a resumed run is identical bit for bit; slower."""
    gradient_clipping: float = field(default=1.0, metadata=bounds(at_least=0))
    """Maximum global gradient norm; 0: no clipping."""
    gradient_checkpointing: str = field(default="none", metadata=FREE)
    """Layers whose activations are recomputed in the backward pass to save memory: none, all, or every_N."""
    attention_kernel: Literal["auto", "eager", "sdpa", "varlen"] = field(default="auto", metadata=FREE)
    """Attention kernel; auto: the fastest that the device and the dropout allow."""
    compile: bool | None = field(default=None, metadata=FREE)
    """Whether torch.compile compiles the encoder's layers, on GPUs; not with zero.stage 3; null: with flash attention
    at zero.stage 0, as decided at the first start."""
    qkv_gradients: Literal["parts", "joined"] = field(default="parts", metadata=FREE)
    """How backward computes the gradient of the projection to queries, keys and values, with the varlen kernel and
    without rotary positions: by products of each of the three, or concatenated by one. `make gpu` measures both."""
    loss_reduction: Literal["tokens", "samples"] = "tokens"
    """tokens: mean over all masked tokens of the global batch; samples: mean of the means of the samples."""
    causal_share: float = field(default=0.0, metadata=bounds(at_least=0, below=1))
    """Share of each step's samples whose next tokens are predicted, with causal attention, in the place of masked ones,
    and the weight of their mean loss beside the others' (arXiv 2410.24159); a micro-batch has one of both kinds; up to
    masking.next_tokens_until, if that is given; 0: none."""
    log_every_steps: int = field(default=10, metadata=FREE | bounds(at_least=1))
    """Steps between two lines of metrics."""
    max_skipped_steps: int = field(default=20, metadata=FREE | bounds(at_least=1))
    """Consecutive steps with an infinite or NaN loss or gradient, each skipped, after which the run ends with an
    error."""
    stop_before_seconds: float | None = field(default=None, metadata=FREE | bounds(at_least=0, at_most=MOST_SECONDS))
    """Seconds before the job's time limit, as the scheduler reports it, at which the run saves a checkpoint and stops;
    null: never."""
    grace_seconds: float | None = field(default=None, metadata=FREE | bounds(at_least=0, at_most=MOST_SECONDS))
    """Seconds from a stop signal to the end of the job, as set in the job files: Slurm's --signal, Kubernetes'
    terminationGracePeriodSeconds. A run in an object store warns if its checkpoints take longer; null: unknown."""

    def __post_init__(self) -> None:
        check_bounds("train", self)
        check_ends("train.batch_phases", [*(phase.until_tokens for phase in self.batch_phases), None])
        for phase in self.batch_phases:
            check_bounds("train.batch_phases", phase)
        if self.tf32 and self.precision != "fp32":
            raise UserError(
                f"train.tf32: found true with train.precision {self.precision}, expected false: its products have 16 "
                "bits; use --train.precision fp32 with it"
            )
        self._check_growth()
        self._check_causal_share()

    def _check_growth(self) -> None:
        initial, grows = self.initial_global_batch_size, self.initial_global_batch_size is not None
        if grows != (self.batch_warmup_tokens > 0):
            raise UserError(
                f"train.initial_global_batch_size, train.batch_warmup_tokens: found {initial} and "
                f"{self.batch_warmup_tokens}, expected both or none"
            )
        if grows and self.batch_phases:
            raise UserError(
                f"train.batch_phases: found them with train.initial_global_batch_size {initial}, expected one of the "
                "two"
            )
        if self.batch_increment is not None and not grows:
            raise UserError(
                f"train.batch_increment: found {self.batch_increment} without train.initial_global_batch_size, "
                "expected null: the batch does not grow"
            )
        if self.increment is not None and (self.growth < 0 or self.growth % self.increment):
            raise UserError(
                f"train.batch_increment: found {self.increment}, expected a divisor of the growth from "
                f"train.initial_global_batch_size = {initial} to train.global_batch_size = {self.global_batch_size}"
            )

    def _check_causal_share(self) -> None:
        for name, size in self.batch_sizes.items():
            exact = abs(self.causal_share * size - self._causal(size)) <= _WHOLE * size
            if self.causal_share and not (exact and 0 < self._causal(size) < size):
                raise UserError(
                    f"train.causal_share: found {self.causal_share} of train.{name} = {size}, expected a share of "
                    f"whole samples, such as {max(1, min(self._causal(size), size - 1)) / size:g}"
                )

    def for_size(self: Train, parameters: int) -> Train:
        """With the peak learning rate by the number of parameters of the encoder's layers, unless it is given."""
        if self.learning_rate != AUTO:
            return self
        return replace(self, learning_rate=peak_rate(self.rates, parameters))

    @property
    def peak_rate(self) -> float:
        """The peak learning rate; call `for_size` first."""
        assert self.learning_rate != AUTO, "for_size comes first"
        return self.learning_rate

    @property
    def micro_batch(self) -> int:
        """The size of a micro-batch, after `on` and the choice by the device."""
        assert isinstance(self.micro_batch_size, int), "it has been found out"
        return self.micro_batch_size

    @property
    def growth(self) -> int:
        """Total growth of the global batch in samples."""
        return self.global_batch_size - (self.initial_global_batch_size or self.global_batch_size)

    @property
    def batch_changes(self) -> bool:
        """Whether global batches have several sizes."""
        return bool(self.growth or self.batch_phases)

    @property
    def increment(self) -> int | None:
        """Growth of the global batch per increment in samples."""
        return self.batch_increment or self.initial_global_batch_size

    @property
    def causal_part(self) -> Fraction:
        """`causal_share` as the number of samples out of those of a step."""
        return Fraction(self._causal(self.global_batch_size), self.global_batch_size)

    def _causal(self, size: int) -> int:
        """Samples with next tokens of a step with `size`."""
        return round(self.causal_share * size)

    @property
    def common_size(self) -> int:
        """The largest number of samples that divides every step, and every step's samples with next tokens: what
        processes and micro-batches must divide."""
        sizes = self.batch_sizes.values()
        return math.gcd(*sizes, *map(self._causal, sizes))

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The sizes of steps that occur, or whose sums do, by field name."""
        sizes = {"global_batch_size": self.global_batch_size}
        if self.initial_global_batch_size is not None and self.increment is not None:
            sizes |= {"initial_global_batch_size": self.initial_global_batch_size, "batch_increment": self.increment}
        return sizes | {
            f"batch_phases[{number}].global_batch_size": phase.global_batch_size
            for number, phase in enumerate(self.batch_phases)
        }

    def on(self: Train, world_size: int) -> Train:
        """The section with the micro-batch size at this world size; auto and null, which depend on the device, stay."""
        if self.micro_batch_size in ("auto", None):
            return self
        return replace(self, micro_batch_size=BatchArithmetic.of(self, world_size).micro_batch_size)

    def compiles(self, kernel: str, stage: int) -> bool:
        """Whether layers with this attention kernel are compiled at this ZeRO stage: as given, else only for tested
        combinations.
        """
        return kernel == "varlen" and stage == 0 if self.compile is None else self.compile

    @property
    def budget_seconds(self) -> float | None:
        """The time budget in the unit of the clock."""
        return None if self.time_budget_hours is None else self.time_budget_hours * 3600


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _nearest_divisors(size: int, count: int) -> list[int]:
    """The largest divisor of a size below a number, and the smallest above it if there is one."""
    below = next(each for each in range(min(count, size), 0, -1) if size % each == 0)
    above = next((each for each in range(count + 1, size + 1) if size % each == 0), None)
    return [below] if above is None else [below, above]


@dataclass(frozen=True)
class BatchArithmetic:
    """How a global batch divides: global = micro x accumulation x processes."""

    global_batch_size: int
    """Samples of all processes in a step."""
    micro_batch_size: int
    """Samples of a forward pass of one process."""
    gradient_accumulation_steps: int
    """Forward passes of a process in a step."""
    world_size: int
    """Processes of the run."""
    growth: str = ""
    """How the global batch grows, in words; empty: it does not."""

    @classmethod
    def of(cls, train: TrainConfig, world_size: int) -> BatchArithmetic:
        """Divide the batch; auto and null count as 1.

        Raises:
            UserError: it is not a multiple of the world size.
        """
        for name, size in train.batch_sizes.items():
            if size % world_size:
                less = size - size % world_size
                near = f"{less} or {less + world_size}" if less else world_size
                dividing = _nearest_divisors(train.common_size, world_size)
                raise UserError(
                    f"train.{name}: found {size}, expected a multiple of the {world_size} processes; set "
                    f"it to {near} (a run that is resumed accepts that with --checkpoint.accept_changes true), or use "
                    "another number of processes: " + " or ".join(map(str, dividing))
                )
        if train.common_size % world_size:
            raise UserError(
                f"train.causal_share: found {train.causal_share} of train.global_batch_size = "
                f"{train.global_batch_size}, expected samples that the {world_size} processes divide; change one of "
                "the three"
            )
        share = train.common_size // world_size
        wished = train.micro_batch_size if isinstance(train.micro_batch_size, int) else 1
        micro_batch_size = next(size for size in range(min(wished, share), 0, -1) if share % size == 0)
        grows = train.initial_global_batch_size is not None
        growth = (
            (
                f"; grows from {train.initial_global_batch_size} by {train.increment} over the first "
                f"{train.batch_warmup_tokens:,} tokens"
            )
            if grows
            else ""
        )
        growth += "".join(
            f"; {phase.global_batch_size} up to {phase.until_tokens:,} tokens" for phase in train.batch_phases
        )
        return cls(
            train.global_batch_size,
            micro_batch_size,
            train.global_batch_size // (micro_batch_size * world_size),
            world_size,
            growth,
        )

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size} = {self.micro_batch_size} micro x {self.gradient_accumulation_steps} "
            f"accumulation x {self.world_size} process" + ("es" if self.world_size > 1 else "") + self.growth
        )
