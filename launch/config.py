"""What a run is told: frozen dataclasses, a sentence under each field; batch arithmetic checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from model.config import BertConfig
from pipeline.errors import UserError


def at_least(section: str, config: object, **minimums: float) -> None:
    """Raise UserError, naming the field, if a value is below its minimum."""
    for name, least in minimums.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{section}.{name}: found {value}, expected at least {least}")


@dataclass(frozen=True)
class TrainConfig:
    """How much is trained, in which portions and with which numbers."""

    max_steps: int = 1000
    """Optimizer steps of the whole run, at least 1; with a time budget the most that there may be."""
    time_budget_hours: float | None = None
    """Hours of training after which the run is complete, above 0: the schedule follows the clock; null: none."""
    global_batch_size: int = 256
    """Samples in one optimizer step over all processes; a multiple of micro_batch_size x processes."""
    initial_global_batch_size: int | None = None
    """Samples in the first steps, from which the global batch grows; a multiple as well; null: it does not grow."""
    batch_increment: int | None = None
    """Samples by which the global batch grows at a time; a multiple as well; null: initial_global_batch_size."""
    batch_warmup_tokens: int = 0
    """Real tokens after which the global batch has its full size, 0 or more."""
    micro_batch_size: int = 32
    """Samples in one forward and backward pass of one process."""
    learning_rate: float = 1e-4
    """Peak learning rate, above 0; the schedule multiplies it."""
    precision: Literal["bf16", "fp16", "fp32", "autocast"] = "bf16"
    """Number format of the matrix products: bf16 and fp16 keep fp32 master weights; fp16 needs a GPU; autocast:
    bf16 products over fp32 weights, at any zero.stage."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0: none."""
    gradient_checkpointing: str = "none"
    """Layers whose activations are computed again in backward to save memory: none, all, or every_N."""
    attention_kernel: Literal["auto", "eager", "sdpa", "varlen"] = "auto"
    """Attention kernel; auto: the fastest that the device and the dropout allow."""
    loss_reduction: Literal["tokens", "samples"] = "tokens"
    """tokens: mean over all masked tokens of the global batch; samples: mean over each sample's mean."""
    log_every_steps: int = 10
    """Steps between two lines of metrics."""
    max_skipped_steps: int = 20
    """Steps in a row whose gradient may be infinite or NaN, each skipped, before the run is given up; at least 1."""
    stop_before_seconds: float | None = None
    """Stop with a checkpoint this long before the time limit of the job that the scheduler has told; null: never."""

    def __post_init__(self) -> None:
        at_least("train", self, max_steps=1, global_batch_size=1, micro_batch_size=1, gradient_clipping=0,
                 log_every_steps=1, max_skipped_steps=1, stop_before_seconds=0, initial_global_batch_size=1,
                 batch_increment=1, batch_warmup_tokens=0)
        if self.learning_rate <= 0:
            raise UserError(f"train.learning_rate: found {self.learning_rate}, expected more than 0")
        if self.time_budget_hours is not None and self.time_budget_hours <= 0:
            raise UserError(f"train.time_budget_hours: found {self.time_budget_hours}, expected more than 0")
        grows = self.initial_global_batch_size is not None
        if grows != (self.batch_warmup_tokens > 0):
            raise UserError("train.initial_global_batch_size, train.batch_warmup_tokens: found "
                            f"{self.initial_global_batch_size} and {self.batch_warmup_tokens}, expected both or none")
        if grows and (self.growth < 0 or self.growth % self.increment):
            raise UserError(f"train.batch_increment: found {self.increment}, expected a divisor of the growth from "
                            f"train.initial_global_batch_size = {self.initial_global_batch_size} to "
                            f"train.global_batch_size = {self.global_batch_size}")

    @property
    def growth(self) -> int:
        """Samples by which the global batch grows in all."""
        return self.global_batch_size - (self.initial_global_batch_size or self.global_batch_size)

    @property
    def increment(self) -> int | None:
        """Samples by which the global batch grows at a time."""
        return self.batch_increment or self.initial_global_batch_size

    @property
    def budget_seconds(self) -> float | None:
        """The time budget in the unit of the clock."""
        return None if self.time_budget_hours is None else self.time_budget_hours * 3600


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients move the weights; the defaults are the constants of the BERT release."""

    name: Literal["adamw", "lamb", "muon", "stable_adamw"] = "adamw"
    """adamw; lamb, for batches of tens of thousands; muon for the encoder's matrices with adamw for the rest;
    stable_adamw: each tensor's update clipped. All but adamw look at whole tensors and need zero.stage 0."""
    implementation: Literal["torch", "deepspeed"] = "torch"
    """Whose kernels: torch's fused ones, or for adamw DeepSpeed's, which a compiler builds at the first start."""
    bias_correction: bool = True
    """Whether moments are divided by 1 - beta^t (adamw, lamb); the BERT release does not."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and of the second moment, both 0 <= beta < 1."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms never decay."""
    decay_embeddings: bool = True
    """Whether embeddings decay too (they do in the BERT release)."""
    layer_decay: float = 1.0
    """Learning rate of each layer as a share of that of the layer above, above 0 and at most 1; for fine-tuning."""
    momentum: float = 0.95
    """Muon's momentum, 0 <= momentum < 1 (muon)."""
    trust_ratio_bounds: list[float] | None = None
    """Least and greatest ratio by which a tensor's update is scaled; null: unbounded (lamb)."""
    adapt_undecayed: bool = True
    """Whether what does not decay (biases, norms) is scaled too; NVIDIA's implementation does not (lamb)."""

    def __post_init__(self) -> None:
        at_least("optimizer", self, eps=0, weight_decay=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas: found {self.betas}, expected two numbers, both 0 <= beta < 1")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"optimizer.layer_decay: found {self.layer_decay}, expected above 0 and at most 1")
        if not 0 <= self.momentum < 1:
            raise UserError(f"optimizer.momentum: found {self.momentum}, expected 0 <= momentum < 1")
        bounds = self.trust_ratio_bounds
        if bounds is not None and (len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]):
            raise UserError(f"optimizer.trust_ratio_bounds: found {bounds}, expected two numbers, the least first")
        if self.implementation == "deepspeed" and self.name != "adamw":
            raise UserError(f"optimizer.implementation: found deepspeed with optimizer.name {self.name}, expected "
                            "torch: of DeepSpeed's kernels only adamw's are used")
        if not self.bias_correction and self.name not in ("adamw", "lamb"):
            raise UserError(f"optimizer.bias_correction: found false with optimizer.name {self.name}, expected true; "
                            "only adamw and lamb have a form without")

    @property
    def whole_tensors(self) -> bool:
        """Whether an update depends on all of a tensor, so that it cannot be made of the parts that ZeRO keeps."""
        return self.name != "adamw"


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step, or of the time that a run with a time budget has used."""

    name: Literal[
        "linear", "cosine", "constant", "polynomial", "poly_nvidia", "inverse_sqrt", "wsd", "exponential"
    ] = "linear"
    """Shape after the warmup; the warmup itself is always linear. docs/recipes.md draws them."""
    warmup_steps: int | None = None
    """Steps of warmup; null: warmup_share of all steps."""
    warmup_share: float = 0.01
    """Share of all steps (or of the time budget) that is warmup, 0 to 1; used when warmup_steps is null."""
    warmup_tokens: int | None = None
    """Real tokens of warmup instead, at least 1; for shapes that do not start where it ends: constant, wsd,
    poly_nvidia."""
    initial_share: float = 0.0
    """Share of the peak rate at step 0 of the warmup, 0 to 1."""
    final_share: float = 0.0
    """Share of the peak rate at the last step, 0 to 1 (linear, cosine, polynomial, poly_nvidia, wsd)."""
    power: float = 0.5
    """Exponent of the polynomial decays, above 0."""
    decay_share: float = 0.1
    """Share of all steps that is decay, above 0 and at most 1 (wsd)."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """With t = share of the decay that is done, linear: 1 - t; sqrt: 1 - sqrt(t) (wsd)."""
    factor: float = 0.9
    """What the rate is multiplied by every `factor_steps`, above 0 and at most 1 (exponential)."""
    factor_steps: int = 250
    """Steps between two multiplications, at least 1 (exponential)."""

    def __post_init__(self) -> None:
        at_least("schedule", self, warmup_steps=0, warmup_share=0, warmup_tokens=1, initial_share=0, final_share=0,
                 factor_steps=1)
        for name in ("warmup_share", "initial_share", "final_share"):
            if getattr(self, name) > 1:
                raise UserError(f"schedule.{name}: found {getattr(self, name)}, expected 0 to 1")
        if self.power <= 0:
            raise UserError(f"schedule.power: found {self.power}, expected more than 0")
        for name in ("decay_share", "factor"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"schedule.{name}: found {getattr(self, name)}, expected above 0 and at most 1")
        if self.warmup_tokens is not None:
            if self.name not in ("constant", "wsd", "poly_nvidia"):
                raise UserError(f"schedule.warmup_tokens: found {self.warmup_tokens} with schedule.name {self.name}, "
                                "expected null: it starts at the step where the warmup ends; give warmup_steps, or "
                                "use constant, wsd or poly_nvidia")
            if self.warmup_steps is not None:
                raise UserError("schedule.warmup_tokens: found beside schedule.warmup_steps, expected one of them")


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

    def __post_init__(self) -> None:
        at_least("checkpoint", self, every_steps=0, keep_last=1)


@dataclass(frozen=True)
class EvaluationConfig:
    """When the run is measured on the validation split, and what follows from it."""

    every_steps: int = 500
    """Steps between two evaluations; 0: only before the first and after the last step."""
    samples: int | None = None
    """Validation samples used, the same ones with the same masks each time; null: all."""
    metric: str = "loss"
    """Which `validation/...` curve decides what is best: less is better for losses, more for everything else."""
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
        return value < than if self.metric.endswith(("loss", "perplexity")) else value > than


@dataclass(frozen=True)
class MonitorConfig:
    """What is watched beside the curves, and how often."""

    inspect_every_steps: int = 100
    """Steps between two that are looked into: norms of each layer, memory, communication; 0: none."""
    examples: int = 4
    """Validation samples whose blanks and guesses are shown at each evaluation; 0: none."""
    embeddings: bool = False
    """Whether each evaluation takes a snapshot of the word embeddings for TensorBoard's projector."""
    profile_steps: list[int] = field(default_factory=list)
    """First and last of the steps, from 0, that torch.profiler records into RUN/profile; empty: none."""
    heartbeat_seconds: float = 10.0
    """Time between two writings of each process's heartbeat file, above 0."""
    hang_seconds: float = 600.0
    """Time without progress after which a process says where it stands, with stack traces, above heartbeat_seconds."""

    def __post_init__(self) -> None:
        at_least("monitor", self, inspect_every_steps=0, examples=0)
        if self.heartbeat_seconds <= 0:
            raise UserError(f"monitor.heartbeat_seconds: found {self.heartbeat_seconds}, expected more than 0")
        if self.hang_seconds <= self.heartbeat_seconds:
            raise UserError(f"monitor.hang_seconds: found {self.hang_seconds}, expected more than "
                            f"monitor.heartbeat_seconds = {self.heartbeat_seconds}")
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 0 <= steps[0] <= steps[1]):
            raise UserError(f"monitor.profile_steps: found {self.profile_steps}, expected the first and the last step")


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


@dataclass(frozen=True)
class LossScaleConfig:
    """What fp16 losses are multiplied by so that small gradients stay above zero: halved when a gradient overflows."""

    initial_power: int = 16
    """Exponent of two of the first scale, 0 to 32."""
    window: int = 1000
    """Steps without an overflow after which the scale is doubled, at least 1."""
    hysteresis: int = 2
    """Overflows, in a row or not, before the scale is halved, at least 1."""
    minimum: float = 1.0
    """Least scale, above 0."""

    def __post_init__(self) -> None:
        at_least("loss_scale", self, initial_power=0, window=1, hysteresis=1)
        if self.initial_power > 32:
            raise UserError(f"loss_scale.initial_power: found {self.initial_power}, expected 0 to 32")
        if self.minimum <= 0:
            raise UserError(f"loss_scale.minimum: found {self.minimum}, expected more than 0")


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run."""

    data: str
    """Folder that `cloze prepare` wrote."""
    output: str
    """Folder of the run: checkpoints, metrics, TensorBoard events, the resolved configuration."""
    seed: int = 42
    """Seed of initial weights, order of samples and dropout, 0 or more."""
    init_from: str | None = None
    """Folder of a run, or of a Hugging Face BERT, whose weights this run starts from; null: drawn ones."""
    init_optimizer: bool = False
    """Whether the optimizer's moments are taken from that run too."""
    init_positions: Literal["same", "extend"] = "same"
    """What to do if the model has more learned positions than init_from. same: refuse; extend: draw the others."""
    model: BertConfig = field(default_factory=BertConfig)
    """Shape of the model; a file of configs/model/ or single fields."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How much is trained, in which portions and with which numbers."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its constants."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved, what is kept and how it goes on."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When the run is measured on the validation split, and what follows from it."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What is watched beside the curves, and how often."""
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """What is partitioned over the processes."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Scale of the loss in fp16."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further settings of DeepSpeed, by its own names; one that contradicts what the fields above make is refused."""

    def __post_init__(self) -> None:
        if self.init_optimizer and self.init_from is None:
            raise UserError("init_optimizer: found true without init_from, expected the run whose moments to take")
        if self.seed < 0:
            raise UserError(f"seed: found {self.seed}, expected 0 or more")
        if self.train.precision == "fp16" and self.zero.stage == 0:
            # DeepSpeed accumulates fp16 gradients in fp32 only where it partitions (engine.py,
            # _do_optimizer_sanity_check); with one process stage 1 partitions nothing away.
            raise UserError("train.precision: found fp16 at zero.stage 0, expected stage 1 to 3, where gradients are "
                            "accumulated in fp32; add --zero.stage 1")
        if self.optimizer.whole_tensors and self.zero.stage:
            raise UserError(f"optimizer.name: found {self.optimizer.name} at zero.stage {self.zero.stage}, expected "
                            "adamw: it measures whole tensors, of which each process would hold a part; use "
                            "--zero.stage 0")
        warmup = self.schedule.warmup_steps
        if self.train.time_budget_hours is not None:
            if warmup is not None or self.schedule.name == "exponential":
                name = "name: found exponential" if warmup is None else f"warmup_steps: found {warmup}"
                raise UserError(f"schedule.{name} with train.time_budget_hours, expected a schedule that counts no "
                                "steps; use warmup_share, and another name than exponential")
        elif warmup is not None and warmup > self.train.max_steps:
            raise UserError(f"schedule.warmup_steps: found {warmup}, expected at most train.max_steps = "
                            f"{self.train.max_steps}")


@dataclass(frozen=True)
class DeepSpeedConfig(PretrainConfig):
    """What DeepSpeed would be given for a pretraining run."""

    data: str = ""
    """Not read."""
    output: str = ""
    """Not read."""
    processes: int = 1
    """Processes of the run, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("deepspeed-config", self, processes=1)


@dataclass(frozen=True)
class BatchArithmetic:
    """How a global batch divides: global = micro x accumulation x processes."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    growth: str = ""

    @classmethod
    def of(cls, train: TrainConfig, world_size: int) -> BatchArithmetic:
        """Divide; UserError with the numbers if it leaves a rest."""
        at_once = train.micro_batch_size * world_size
        sizes = {"global_batch_size": train.global_batch_size}
        if train.initial_global_batch_size is not None:
            sizes |= {"initial_global_batch_size": train.initial_global_batch_size, "batch_increment": train.increment}
        for name, size in sizes.items():
            if size % at_once:
                # The largest micro-batch not above the wished one that divides all, if the processes divide all.
                shares = [size // world_size for size in sizes.values()]
                mend = f"set train.{name} to a multiple of {world_size}"
                if not any(size % world_size for size in sizes.values()):
                    fitting = (n for n in range(min(train.micro_batch_size, *shares), 0, -1)
                               if not any(share % n for share in shares))
                    mend = f"set train.micro_batch_size to {next(fitting)}"
                raise UserError(f"train.{name}: found {size}, expected a multiple of train.micro_batch_size x "
                                f"processes = {train.micro_batch_size} x {world_size} = {at_once}; {mend}")
        grows = train.initial_global_batch_size is not None
        growth = (f"; grows from {train.initial_global_batch_size} by {train.increment} over the first "
                  f"{train.batch_warmup_tokens:,} tokens") if grows else ""
        return cls(train.global_batch_size, train.micro_batch_size, train.global_batch_size // at_once, world_size,
                   growth)

    def __str__(self) -> str:
        return (f"{self.global_batch_size} = {self.micro_batch_size} micro x {self.gradient_accumulation_steps} "
                f"accumulation x {self.world_size} process" + ("es" if self.world_size > 1 else "") + self.growth)


@dataclass(frozen=True)
class ExportConfig:
    """Turn a run's newest good checkpoint into a Hugging Face folder."""

    run: str
    """Folder of the run."""
    output: str | None = None
    """Folder to write, which must not exist yet or be empty; null: RUN-hf."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint; best: that of the best evaluation (evaluation.keep_best); null: the newest good one."""


@dataclass(frozen=True)
class FillMaskConfig:
    """Fill the blanks of a text."""

    model: str
    """A Hugging Face folder of a BERT, or the folder of a Cloze run."""
    text: list[str] = field(default_factory=list)
    """Texts with one or more [MASK]."""
    top_k: int = 5
    """Guesses printed for each blank, at least 1."""

    def __post_init__(self) -> None:
        at_least("predict", self, top_k=1)
        if not self.text:
            raise UserError('text: found none, expected a text with a blank, such as "The capital of [MASK] is Paris."')


@dataclass(frozen=True)
class QuickstartConfig:
    """The whole chain on a small text: vocabulary, shards, pretraining, stop and resume, export, blanks."""

    output: str = "runs/quickstart"
    """Folder for everything that is made; steps whose result is there already are not repeated."""
    processes: int = 2
    """Training processes, at least 1."""

    def __post_init__(self) -> None:
        at_least("quickstart", self, processes=1)
