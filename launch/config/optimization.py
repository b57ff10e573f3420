"""Configuration of optimizer, learning rate schedule and loss scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config.checks import at_least
from cloze.launch.config.marks import FIXED
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; the defaults are the constants of the BERT release."""

    name: Literal["adamw", "lamb", "muon", "stable_adamw"] = field(default="adamw", metadata=FIXED)
    """adamw; lamb: for batches of tens of thousands; muon: for the encoder's matrices, with adamw for the rest;
    stable_adamw: each tensor's update is clipped. All but adamw update whole tensors, which zero.stage 1 and 2 divide
    among the processes."""
    implementation: Literal["torch", "deepspeed"] = field(default="torch", metadata=FIXED)
    """Source of the kernels: torch's fused ones, or for adamw DeepSpeed's, which are compiled at the first start."""
    bias_correction: bool = True
    """Whether moments are divided by 1 - beta^t (adamw, lamb); the BERT release does not."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and the second moment, both 0 <= beta < 1."""
    eps: float = 1e-6
    """Added to the square root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms never decay."""
    decay_embeddings: bool = field(default=True, metadata=FIXED)
    """Whether weight decay applies to embeddings (it does in the BERT release)."""
    layer_decay: float = field(default=1.0, metadata=FIXED)
    """Learning rate of each layer as a share of the rate of the layer above, above 0 and at most 1; for fine-tuning."""
    momentum: float = 0.95
    """Muon's momentum, 0 <= momentum < 1 (muon)."""
    trust_ratio_bounds: list[float] | None = None
    """Minimum and maximum ratio by which a tensor's update is scaled; null: unbounded (lamb)."""
    adapt_undecayed: bool = True
    """Whether tensors without weight decay (biases, norms) are scaled too; NVIDIA's implementation does not (lamb)."""

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
            raise UserError(
                f"optimizer.implementation: found deepspeed with optimizer.name {self.name}, expected "
                "torch: of DeepSpeed's kernels only adamw's are used"
            )
        if not self.bias_correction and self.name not in ("adamw", "lamb"):
            raise UserError(
                f"optimizer.bias_correction: found false with optimizer.name {self.name}, expected true; "
                "only adamw and lamb have a form without"
            )

    @property
    def whole_tensors(self) -> bool:
        """Whether an update depends on the whole tensor, so that it cannot be computed on the parts of ZeRO."""
        return self.name != "adamw"


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step, or of the time that a run with a time budget has used."""

    name: Literal["linear", "cosine", "constant", "polynomial", "poly_nvidia", "inverse_sqrt", "wsd", "exponential"] = (
        "linear"
    )
    """Shape after the warmup, which itself is always linear. docs/recipes.md shows the shapes."""
    warmup_steps: int | None = None
    """Warmup steps; null: warmup_share of all steps."""
    warmup_of_steps: int | None = None
    """Steps of the run that warmup_steps is meant for, at least 1: a shorter run has as much less warmup. Set where the
    command line makes a run shorter than its recipe; null: warmup_steps is meant for any."""
    warmup_share: float = 0.01
    """Share of all steps (or of the time budget) used for warmup, 0 to 1; applies when warmup_steps is null."""
    warmup_tokens: int | None = None
    """Warmup in real tokens instead of steps, at least 1; only for shapes that do not start where the warmup ends:
    constant, wsd, poly_nvidia."""
    initial_share: float = 0.0
    """Share of the peak rate at step 0 of the warmup, 0 to 1."""
    final_share: float = 0.0
    """Share of the peak rate at the last step, 0 to 1 (linear, cosine, polynomial, poly_nvidia, wsd)."""
    power: float = 0.5
    """Exponent of the polynomial decays, above 0."""
    decay_share: float = 0.1
    """Share of all steps used for the decay, above 0 and at most 1 (wsd)."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """linear: 1 - t; sqrt: 1 - sqrt(t), where t is the share of the decay that is done (wsd)."""
    factor: float = 0.9
    """Factor by which the rate is multiplied every `factor_steps`, above 0 and at most 1 (exponential)."""
    factor_steps: int = 250
    """Steps between two multiplications, at least 1 (exponential)."""

    def __post_init__(self) -> None:
        at_least(
            "schedule",
            self,
            warmup_steps=0,
            warmup_of_steps=1,
            warmup_share=0,
            warmup_tokens=1,
            initial_share=0,
            final_share=0,
            factor_steps=1,
        )
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
                raise UserError(
                    f"schedule.warmup_tokens: found {self.warmup_tokens} with schedule.name {self.name}, "
                    "expected null: it starts at the step where the warmup ends; give warmup_steps, or "
                    "use constant, wsd or poly_nvidia"
                )
            if self.warmup_steps is not None:
                raise UserError("schedule.warmup_tokens: found beside schedule.warmup_steps, expected one of them")

    def warmup_in(self, steps: float) -> int:
        """Warmup steps of a run of this length; of warmup_tokens apart."""
        if self.warmup_steps is None:
            return round(self.warmup_share * steps)
        if self.warmup_of_steps is None or steps >= self.warmup_of_steps:
            return self.warmup_steps
        return round(self.warmup_steps * steps / self.warmup_of_steps)


@dataclass(frozen=True)
class LossScaleConfig:
    """Loss scale in fp16, which keeps small gradients above zero: halved when a gradient overflows."""

    initial_power: int = 16
    """Exponent of the initial scale, a power of two, 0 to 32."""
    window: int = 1000
    """Steps without an overflow after which the scale is doubled, at least 1."""
    hysteresis: int = 2
    """Overflows, consecutive or not, before the scale is halved, at least 1."""
    minimum: float = 1.0
    """Minimum scale, above 0."""

    def __post_init__(self) -> None:
        at_least("loss_scale", self, initial_power=0, window=1, hysteresis=1)
        if self.initial_power > 32:
            raise UserError(f"loss_scale.initial_power: found {self.initial_power}, expected 0 to 32")
        if self.minimum <= 0:
            raise UserError(f"loss_scale.minimum: found {self.minimum}, expected more than 0")
