"""Configuration of checkpoints, evaluation, monitoring, the data cache, ZeRO, averages of the weights and masking."""

from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config.metrics import lower_is_better
from cloze.launch.config.training import check_ends
from cloze.pipeline.bounds import MOST_SECONDS, POSITIVE_SHARE, bounds, check_bounds
from cloze.pipeline.errors import UserError

# Seconds. A lease lasts a fifth longer, and others wait half an hour for rank 0 (launch/system/distributed.py).
_LONGEST_PATIENCE = 1200


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, which are kept and how a run resumes."""

    every_steps: int = field(default=1000, metadata=bounds(at_least=0))
    """Steps between two checkpoints; 0: only at the end of the run and when it is stopped."""
    every_minutes: float | None = field(default=None, metadata=bounds(above=0))
    """Minutes after which a checkpoint is saved besides those by steps, once the one before is written; null: by steps
    alone."""
    keep_last: int = field(default=2, metadata=bounds(at_least=1))
    """Number of newest checkpoints that are kept."""
    asynchronous: bool = True
    """Whether training continues while a checkpoint is written, from a copy in host memory."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto: resume from the newest good checkpoint, if any; required: fail without one; never: fail with one."""
    accept_changes: bool = False
    """Whether a run may resume with other values of the fields that affect its result."""
    local: int | None = field(default=None, metadata=bounds(at_least=1))
    """Steps between two local checkpoints in scratch, of which only the newest is kept, for a quick restart on the same
    machines of a run whose output is in an object store: a divisor of every_steps, whose checkpoints go to the store;
    null: no local ones."""
    scratch: str | None = None
    """Folder on a local disk where a run whose output is in an object store writes its checkpoints before they are
    uploaded, with room for five times a machine's share of one; null: ~/.cache/cloze/runs."""
    store_patience_seconds: float = field(default=180.0, metadata=bounds(at_least=1, at_most=_LONGEST_PATIENCE))
    """Seconds for which an object store may be unreachable before a run whose output is there saves to
    scratch and ends. A start on other machines waits 1.2 times as long, at least 30 s, for a run that was killed."""

    def __post_init__(self) -> None:
        check_bounds("checkpoint", self)
        if self.local is not None and self.every_steps % self.local:
            raise UserError(
                f"checkpoint.local: found {self.local}, expected a divisor of checkpoint.every_steps = "
                f"{self.every_steps}"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """When the run is evaluated on the validation split, and how the results are used."""

    every_steps: int = field(default=500, metadata=bounds(at_least=0))
    """Steps between two evaluations; 0: only before the first and after the last step."""
    samples: int | None = field(default=None, metadata=bounds(at_least=1))
    """Number of validation samples, the same ones with the same masks each time; null: all."""
    metric: str = "loss"
    """The `validation/...` curve that decides which evaluation is best: lower is better for losses and errors, higher
    for everything else."""
    keep_best: bool = False
    """Whether the checkpoint of the best evaluation is saved and kept besides the newest ones."""
    patience: int | None = field(default=None, metadata=bounds(at_least=1))
    """Consecutive evaluations without an improvement after which the run is complete; null: never."""
    target: float | None = None
    """Value of the metric at which the run is complete, such as MLPerf's masked-LM accuracy of 0.72; null: none."""

    def __post_init__(self) -> None:
        check_bounds("evaluation", self)

    def is_better(self, value: float, than: float) -> bool:
        """Whether a value of the metric is better than another."""
        return value < than if lower_is_better(self.metric) else value > than


@dataclass(frozen=True)
class MonitorConfig:
    """What is monitored besides the curves, how often, and where curves are written."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["tensorboard"])
    """Where curves are written besides metrics.jsonl; wandb and mlflow use their own settings (WANDB_MODE,
    MLFLOW_TRACKING_URI). No tracker stops or slows a run, and a resumed run continues its curves."""
    project: str = "cloze"
    """Project (wandb) or experiment (mlflow) that the run belongs to."""
    inspect_every_steps: int = field(default=100, metadata=bounds(at_least=0))
    """Steps between two inspected ones: norms of each layer, on CPUs also communication; 0: none."""
    examples: int = field(default=4, metadata=bounds(at_least=0))
    """Validation samples whose blanks and predictions are shown at each evaluation of pretraining; 0: none."""
    embeddings: bool = False
    """Whether each evaluation saves a snapshot of the word embeddings for TensorBoard's projector."""
    profile_steps: list[int] = field(default_factory=list)
    """First and last step, counted from 0, that torch.profiler records into RUN/profile; empty: none."""
    store_seconds: float = field(default=30.0, metadata=bounds(above=0, at_most=MOST_SECONDS))
    """Seconds between two uploads of curves, events, status and heartbeats to an output in an object store."""
    heartbeat_seconds: float = field(default=10.0, metadata=bounds(above=0, at_most=MOST_SECONDS))
    """Seconds between two writes of each process's heartbeat file."""
    hang_seconds: float = field(default=600.0, metadata=bounds(at_most=MOST_SECONDS))
    """Seconds without progress after which a process reports where it is, with stack traces; above heartbeat_seconds.
    With several processes 1800 or more gives a warning, since collectives time out first."""

    def __post_init__(self) -> None:
        check_bounds("monitor", self)
        steps = self.profile_steps
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError(f"monitor.trackers: found {self.trackers}, expected each at most once")
        if self.hang_seconds <= self.heartbeat_seconds:
            raise UserError(
                f"monitor.hang_seconds: found {self.hang_seconds}, expected more than monitor.heartbeat_seconds = "
                f"{self.heartbeat_seconds}"
            )
        if steps and not (len(steps) == 2 and 0 <= steps[0] <= steps[1]):
            raise UserError(f"monitor.profile_steps: found {steps}, expected the first and the last step")


@dataclass(frozen=True)
class DataCacheConfig:
    """Local cache of data that is read from an object store."""

    folder: str | None = None
    """Folder on a local disk, shared by the processes of a machine; null: ~/.cache/cloze/data."""
    gigabytes: float = field(default=20.0, metadata=bounds(at_least=0.1))
    """Maximum size of the cache; the least recently used data is removed first."""

    def __post_init__(self) -> None:
        check_bounds("data_cache", self)


@dataclass(frozen=True)
class ZeroConfig:
    """What DeepSpeed partitions across the processes (Rajbhandari et al. 2020)."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is partitioned. 0: nothing; 1: optimizer states; 2: also gradients; 3: also parameters."""
    offload_optimizer: bool = False
    """Whether optimizer states and master weights are kept in host memory, where the optimizer step then runs (stages
    2, 3); optimizer.implementation deepspeed has the faster kernel for it."""
    offload_parameters: bool = False
    """Whether parameters are kept in host memory until a layer needs them (stage 3)."""

    def __post_init__(self) -> None:
        if type(self.stage) is not int:  # the parser looks for an equal value, and True equals 1
            raise UserError(f"zero.stage: found {self.stage}, expected 0, 1, 2 or 3")
        for name, least in (("offload_optimizer", 2), ("offload_parameters", 3)):
            if getattr(self, name) and self.stage < least:
                raise UserError(
                    f"zero.{name}: found true at zero.stage {self.stage}, expected stage {least}"
                    + (" or 3" if least < 3 else "")
                    + f"; add --zero.stage {least}"
                )


@dataclass(frozen=True)
class EmaConfig:
    """An average of the weights: validation/ema_..., and `cloze export --ema true`."""

    decay: float | None = field(default=None, metadata=bounds(at_least=0, below=1))
    """Share of the average that a step keeps, such as 0.9999 (exponential); null: no average, or that of the tail."""
    warmup: bool = True
    """Whether the decay of step n is limited to (1 + n) / (10 + n), so that the initial weights are soon forgotten."""
    tail_share: float | None = field(default=None, metadata=POSITIVE_SHARE)
    """Share of the run's steps, from the end, over whose weights the average is the plain mean; before, it is the
    weights themselves. Instead of decay."""

    def __post_init__(self) -> None:
        check_bounds("ema", self)
        if self.decay is not None and self.tail_share is not None:
            raise UserError("ema.tail_share: found beside ema.decay, expected one of them")

    @property
    def wanted(self) -> bool:
        """Whether an average is kept."""
        return self.decay is not None or self.tail_share is not None


@dataclass(frozen=True)
class MaskingPhase:
    """A masking rate for a part of the run."""

    rate: float = field(metadata=POSITIVE_SHARE)
    """Share of a sample's tokens that is predicted."""
    until_tokens: int | None = None
    """Tokens since the start of the run at which the phase ends."""
    until_share: float | None = field(default=None, metadata=bounds(above=0, below=1))
    """Or the share of the run's samples at which the phase ends; the last phase has neither."""


@dataclass(frozen=True)
class PretrainMaskingConfig:
    """What is predicted during a run: the masking rate, for shards whose masks are drawn at load time; next tokens."""

    rate: float | None = field(default=None, metadata=POSITIVE_SHARE)
    """Initial share of a sample's tokens that is predicted; null: the rate in the shards' manifest, which validation
    uses unless evaluation.masking_rate is given."""
    final_rate: float | None = field(default=None, metadata=POSITIVE_SHARE)
    """Share that is predicted at the end of the run; null: rate."""
    change_begins: float = field(default=0.0, metadata=bounds(at_least=0, below=1))
    """Share of the run's samples after which the rate begins to change, linearly."""
    phases: list[MaskingPhase] = field(default_factory=list)
    """Rates of consecutive phases, instead of rate: each phase but the last with until_tokens or until_share."""
    strategy: Literal["token", "whole_word", "span"] | None = None
    """Unit of masking: a token; a whole word; a span of words; null: as in the shards' manifest, which validation
    always uses."""
    next_tokens_until: int = field(default=0, metadata=bounds(at_least=0))
    """Tokens since the start of the run up to which every next token is predicted, with causal attention, before masked
    ones are (arXiv 2507.00994), or with train.causal_share those of that share; fewer than the run has; also for shards
    that hold their masks; 0: none, or the share all along."""

    def __post_init__(self) -> None:
        check_bounds("masking", self)
        if self.phases and self.rate is not None:
            raise UserError(f"masking.phases: found them with masking.rate {self.rate}, expected one of the two")
        if self.final_rate is not None and self.rate is None:
            raise UserError(f"masking.final_rate: found {self.final_rate} without masking.rate, expected both")
        for phase in self.phases:
            check_bounds("masking.phases", phase)
        for kind, other in (("until_tokens", "until_share"), ("until_share", "until_tokens")):
            if any(getattr(phase, other) is not None for phase in self.phases):
                continue
            check_ends("masking.phases", [getattr(phase, kind) for phase in self.phases])
            break
        else:
            raise UserError("masking.phases: found until_tokens and until_share, expected one of them in all phases")
