"""Configuration of checkpoints, evaluation, monitoring, the data cache and ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config.checks import at_least
from cloze.launch.config.metrics import measure_of
from cloze.pipeline.errors import UserError

# Seconds. A lease lasts a fifth longer, and others wait half an hour for rank 0 (launch/system/distributed.py).
_LONGEST_PATIENCE = 1200


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, what is kept and how it goes on."""

    every_steps: int = 1000
    """Steps between two checkpoints; 0: only at the end of the run and when it is stopped."""
    keep_last: int = 2
    """Checkpoints kept, the newest ones, at least 1."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written, from a copy in host memory."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto: go on from the newest good checkpoint, if any; required: fail without one; never: fail with one."""
    accept_changes: bool = False
    """Whether a run may go on with other values of the fields that shape its result."""
    local: int | None = None
    """Steps between two checkpoints of which only the last one is kept, on the scratch of a run whose output is in an
    object store, for a quick restart on the same machines: a divisor of every_steps, whose checkpoints go to the
    store; null: those alone."""
    scratch: str | None = None
    """Folder on a local disk where a run whose output is in an object store writes its checkpoints before they are
    uploaded, with room for five of a machine's share; null: ~/.cache/cloze/runs."""
    store_patience_seconds: float = 180.0
    """How long an object store may be away, 1 to 1200, before a run whose output is there saves on scratch and ends.
    So long, and a fifth longer, a start on other machines waits for one that was killed: at least 30 s."""

    def __post_init__(self) -> None:
        at_least("checkpoint", self, every_steps=0, keep_last=1, local=1, store_patience_seconds=1)
        if self.store_patience_seconds > _LONGEST_PATIENCE:
            raise UserError(f"checkpoint.store_patience_seconds: found {self.store_patience_seconds:g}, expected at "
                            f"most {_LONGEST_PATIENCE}: other processes wait for rank 0 for half an hour")
        if self.local is not None and self.every_steps % self.local:
            raise UserError(f"checkpoint.local: found {self.local}, expected a divisor of checkpoint.every_steps = "
                            f"{self.every_steps}")


@dataclass(frozen=True)
class EvaluationConfig:
    """When the run is measured on the validation split, and what follows from it."""

    every_steps: int = 500
    """Steps between two evaluations; 0: only before the first and after the last step."""
    samples: int | None = None
    """Validation samples used, the same ones with the same masks each time; null: all."""
    metric: str = "loss"
    """Which `validation/...` curve decides what is best: less is better for losses and errors, more for
    everything else."""
    keep_best: bool = False
    """Whether the best evaluation's checkpoint is saved and kept beside the newest ones."""
    patience: int | None = None
    """Evaluations in a row without a better value after which the run is complete, at least 1; null: never."""
    target: float | None = None
    """Value of the metric at which the run is complete, as MLPerf's masked-LM accuracy of 0.72; null: none."""

    def __post_init__(self) -> None:
        at_least("evaluation", self, every_steps=0, samples=1, patience=1)

    def is_better(self, value: float, than: float) -> bool:
        """Whether a value of the metric is better than another."""
        return value < than if measure_of(self.metric).lower_is_better else value > than


@dataclass(frozen=True)
class MonitorConfig:
    """What is watched beside the curves, and how often; and where curves go."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["tensorboard"])
    """Where curves go beside metrics.jsonl; wandb and mlflow by their own settings (WANDB_MODE, MLFLOW_TRACKING_URI).
    None of them stops or slows a run, and one that is resumed goes on in its curves."""
    project: str = "cloze"
    """Project (wandb) or experiment (mlflow) that the run belongs to."""
    inspect_every_steps: int = 100
    """Steps between two that are looked into: norms of each layer, memory, communication; 0: none."""
    examples: int = 4
    """Validation samples whose blanks and guesses pretraining shows at each evaluation; 0: none."""
    embeddings: bool = False
    """Whether each evaluation takes a snapshot of the word embeddings for TensorBoard's projector."""
    profile_steps: list[int] = field(default_factory=list)
    """First and last of the steps, from 0, that torch.profiler records into RUN/profile; empty: none."""
    store_seconds: float = 30.0
    """Seconds between two uploads of curves, events, status and heartbeats to the object store of the output, above 0.
    """
    heartbeat_seconds: float = 10.0
    """Seconds between two writes of each process's heartbeat file, above 0."""
    hang_seconds: float = 600.0
    """Seconds without progress after which a process reports where it is, with stack traces; above heartbeat_seconds.
    With several processes 1800 or more gives a warning, since collectives end the run then."""

    def __post_init__(self) -> None:
        at_least("monitor", self, inspect_every_steps=0, examples=0)
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError(f"monitor.trackers: found {self.trackers}, expected each at most once")
        for name in ("store_seconds", "heartbeat_seconds"):
            if getattr(self, name) <= 0:
                raise UserError(f"monitor.{name}: found {getattr(self, name)}, expected more than 0")
        if self.hang_seconds <= self.heartbeat_seconds:
            raise UserError(f"monitor.hang_seconds: found {self.hang_seconds}, expected more than "
                            f"monitor.heartbeat_seconds = {self.heartbeat_seconds}")
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 0 <= steps[0] <= steps[1]):
            raise UserError(f"monitor.profile_steps: found {self.profile_steps}, expected the first and the last step")


@dataclass(frozen=True)
class DataCacheConfig:
    """Where a machine keeps what it reads of data in an object store."""

    folder: str | None = None
    """Folder on a local disk, which the processes of a machine share; null: ~/.cache/cloze/data."""
    gigabytes: float = 20.0
    """Most that it takes, at least 0.1; what was used longest ago goes."""

    def __post_init__(self) -> None:
        at_least("data_cache", self, gigabytes=0.1)


@dataclass(frozen=True)
class ZeroConfig:
    """What DeepSpeed partitions over the processes (Rajbhandari et al. 2020)."""

    stage: Literal[0, 1, 2, 3] = 0
    """0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters."""
    offload_optimizer: bool = False
    """Whether optimizer states and master weights live in host memory, where the step is then made (stages 2, 3);
    optimizer.implementation deepspeed has the faster kernel for it."""
    offload_parameters: bool = False
    """Whether parameters live in host memory until a layer needs them (stage 3)."""

    def __post_init__(self) -> None:
        for name, least in (("offload_optimizer", 2), ("offload_parameters", 3)):
            if getattr(self, name) and self.stage < least:
                raise UserError(f"zero.{name}: found true at zero.stage {self.stage}, expected stage {least}"
                                + (" or 3" if least < 3 else "") + f"; add --zero.stage {least}")
