"""Configuration of optimizer, learning rate schedule and loss scale."""

from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config.changes_at_resume import FIXED
from cloze.pipeline.bounds import POSITIVE_SHARE, SHARE, bounds, check_bounds
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
    eps: float = field(default=1e-6, metadata=bounds(at_least=0))
    """Added to the square root of the second moment."""
    weight_decay: float = field(default=0.01, metadata=bounds(at_least=0))
    """Decoupled weight decay of matrices; biases and norms never decay."""
    decay_embeddings: bool = field(default=True, metadata=FIXED)
    """Whether weight decay applies to embeddings (it does in the BERT release)."""
    layer_decay: float = field(default=1.0, metadata=FIXED | POSITIVE_SHARE)
    """Learning rate of each layer as a share of the rate of the layer above; for fine-tuning."""
    momentum: float = field(default=0.95, metadata=bounds(at_least=0, below=1))
    """Muon's momentum (muon)."""
    matrices: Literal["whole", "maps", "heads"] = "whole"
    """What Muon orthogonalizes as one matrix: each weight; each map of those stored as one (queries, keys and values,
    both maps of a gated feed-forward network); or also each attention head of queries, keys and values (muon)."""
    matrix_decay: Literal["plain", "cautious", "hyperball"] = "plain"
    """Decay of Muon's matrices: plain: weight_decay; cautious: weight_decay, of the weights that an update shrinks
    (arXiv 2510.12402); hyperball: none, each matrix keeps its Frobenius norm, and the learning rate is the share of it
    by which a step moves it, some 0.01 (arXiv 2606.16899) (muon)."""
    embedding_rate: float = field(default=1.0, metadata=FIXED | bounds(above=0))
    """Learning rate of embeddings and heads, as a share of that of the encoder's layers."""
    trust_ratio_bounds: list[float] | None = None
    """Minimum and maximum ratio by which a tensor's update is scaled; null: unbounded (lamb)."""
    adapt_undecayed: bool = True
    """Whether tensors without weight decay (biases, norms) are scaled too; NVIDIA's implementation does not (lamb)."""

    def __post_init__(self) -> None:
        check_bounds("optimizer", self)
        ratios, other = self.trust_ratio_bounds, f"with optimizer.name {self.name}"
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas: found {self.betas}, expected two numbers, both 0 <= beta < 1")
        if ratios is not None and (len(ratios) != 2 or not 0 <= ratios[0] <= ratios[1]):
            raise UserError(f"optimizer.trust_ratio_bounds: found {ratios}, expected two numbers, the least first")
        if self.implementation == "deepspeed" and self.name != "adamw":
            raise UserError(
                f"optimizer.implementation: found deepspeed {other}, expected torch: of DeepSpeed's kernels only "
                "adamw's are used"
            )
        for name, given, default in (
            ("matrices", self.matrices, "whole"),
            ("matrix_decay", self.matrix_decay, "plain"),
        ):
            if self.name != "muon" and given != default:
                raise UserError(
                    f"optimizer.{name}: found {given} {other}, expected {default}: only muon orthogonalizes matrices"
                )
        if not self.bias_correction and self.name not in ("adamw", "lamb"):
            raise UserError(
                f"optimizer.bias_correction: found false {other}, expected true; only adamw and lamb have a form "
                "without"
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
    warmup_steps: int | None = field(default=None, metadata=bounds(at_least=0))
    """Warmup steps; null: warmup_share of all steps."""
    warmup_of_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    """Steps of the run that warmup_steps is meant for: a shorter run has as much less warmup. Set where the command
    line makes a run shorter than its recipe; null: warmup_steps is meant for any."""
    warmup_share: float = field(default=0.01, metadata=SHARE)
    """Share of all steps (or of the time budget) used for warmup; applies when warmup_steps is null."""
    warmup_tokens: int | None = field(default=None, metadata=bounds(at_least=1))
    """Warmup in real tokens instead of steps; only for shapes that do not start where the warmup ends: constant, wsd,
    poly_nvidia."""
    initial_share: float = field(default=0.0, metadata=SHARE)
    """Share of the peak rate at step 0 of the warmup."""
    final_share: float = field(default=0.0, metadata=SHARE)
    """Share of the peak rate at the last step (linear, cosine, polynomial, poly_nvidia, wsd)."""
    power: float = field(default=0.5, metadata=bounds(above=0))
    """Exponent of the polynomial decays."""
    decay_share: float = field(default=0.1, metadata=POSITIVE_SHARE)
    """Share of all steps used for the decay (wsd)."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """linear: 1 - t; sqrt: 1 - sqrt(t), where t is the share of the decay that is done (wsd)."""
    factor: float = field(default=0.9, metadata=POSITIVE_SHARE)
    """Factor by which the rate is multiplied every `factor_steps` (exponential)."""
    factor_steps: int = field(default=250, metadata=bounds(at_least=1))
    """Steps between two multiplications (exponential)."""

    def __post_init__(self) -> None:
        check_bounds("schedule", self)
        if self.warmup_tokens is not None and self.name not in ("constant", "wsd", "poly_nvidia"):
            raise UserError(
                f"schedule.warmup_tokens: found {self.warmup_tokens} with schedule.name {self.name}, expected null: it "
                "starts at the step where the warmup ends; give warmup_steps, or use constant, wsd or poly_nvidia"
            )
        if self.warmup_tokens is not None and self.warmup_steps is not None:
            raise UserError("schedule.warmup_tokens: found beside schedule.warmup_steps, expected one of them")

    def warmup_in(self, steps: float) -> int:
        """Warmup in steps (with a time budget: seconds) of a run of this length; 0 with warmup_tokens."""
        if self.warmup_tokens is not None:
            return 0
        if self.warmup_steps is None:
            return round(self.warmup_share * steps)
        if self.warmup_of_steps is None or steps >= self.warmup_of_steps:
            return self.warmup_steps
        return round(self.warmup_steps * steps / self.warmup_of_steps)


@dataclass(frozen=True)
class LossScaleConfig:
    """Loss scale in fp16, which keeps small gradients above zero: halved when a gradient overflows."""

    initial_power: int = field(default=16, metadata=bounds(at_least=0, at_most=32))
    """Exponent of the initial scale, a power of two."""
    window: int = field(default=1000, metadata=bounds(at_least=1))
    """Steps without an overflow after which the scale is doubled."""
    hysteresis: int = field(default=2, metadata=bounds(at_least=1))
    """Overflows, consecutive or not, before the scale is halved."""
    minimum: float = field(default=1.0, metadata=bounds(above=0))
    """Minimum scale."""

    def __post_init__(self) -> None:
        check_bounds("loss_scale", self)
