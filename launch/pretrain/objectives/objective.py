"""The interface of objectives: sums and counts, from which the same loss follows for any split of the global batch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from cloze.launch.config import PretrainConfig
from cloze.launch.training.objective import ModelOutput
from cloze.model.bert import BertForPreTraining, BertPreTrained, PreTrainingOutput
from cloze.model.flops import TokenCounts, training_flops
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import MicroBatch

_Value = TypeVar("_Value")


class Term(NamedTuple):
    """One term of a loss over a micro-batch: a loss for each position that has one."""

    losses: Tensor
    """Losses of any shape, 0 where there is none; their sum is divided by the divisor of the global batch."""
    correct: Tensor | None = None
    """bool: whether the model was right there; None: it is not that kind of loss."""
    weights: Tensor | None = None
    """Factors of the losses in what is minimised, not in the curves; None: 1."""
    count: Tensor | None = None  # type: ignore[assignment]  # the field hides tuple.count, which is not used
    """Losses that there are, (), for the means in the curves; None: as many as the divisor says."""


class Objective(ABC):
    """A pretraining loss: the sum of its terms, each divided by its divisor over the whole global batch.

    A subclass declares its TERMS and implements `terms` and `divisors`; it may have its own model (`build_model`).
    Terms and divisors must be sums over samples, independent of how the global batch is split into ranks and
    micro-batches. Then the gradient is the same for any split. One whose loss needs the outputs of the whole batch is a
    subclass of `cloze.launch.training.objective.WholeBatchObjective` too, and is shown them before the first backward.

    The constructor is called once in every process, before the process group exists, with the run's configuration, in
    which the model is complete, and with `objective_options` as keyword arguments. It raises UserError for wrong
    options.
    """

    TERMS: ClassVar[tuple[str, ...]]
    """Names of the terms. A term `x` has the curves `x_loss` and, if it has `correct`, `x_accuracy`."""
    STEP_SEED: ClassVar[bool] = False
    """Whether the model's forward takes a `step_seed` in training: 0 to 2^63 - 1, the same for all micro-batches of a
    step on all ranks, for what is drawn by sample and not by how the batch is split."""
    NAMES: ClassVar[tuple[str, ...]]
    """What `sums` holds, in this order; made of TERMS."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.weights: dict[str, float] = {}  # weights of terms in the loss; 1 for terms that are not listed
        self.frozen: tuple[nn.Module, ...] = ()  # models that are not trained, such as a teacher: whole on each device

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        terms = getattr(cls, "TERMS", ())
        cls.NAMES = ("loss", *(f"{term}_{sum}" for term in terms for sum in ("loss", "count", "correct")))

    @abstractmethod
    def terms(self, output: ModelOutput, micro_batch: MicroBatch) -> Mapping[str, Term]:
        """The terms by their names in TERMS.

        Args:
            output: output of the model for the micro-batch.
            micro_batch: its inputs, as made by `cloze.pipeline.loading.collate`, on the device.
        """

    @abstractmethod
    def divisors(self, micro_batch: MicroBatch) -> Mapping[str, Tensor | float]:
        """The micro-batch's share of each term's divisor by name, a number or a tensor ().

        Called with tensors on the host before the step, to sum the shares of all micro-batches of all ranks; and with
        tensors on the device for the curves, where it must not wait for them. A sum of 0 counts as 1.
        """

    def build_model(self) -> BertPreTrained:
        """The model, whose weights are then initialized (`cloze.model.initialization`) and trained.

        An override returns an instance of a subclass of BertForPreTraining, or of another BertPreTrained that takes a
        micro-batch and a `dropout_seed` and without labels returns `prediction_logits`. Parameters that a subclass adds
        are trained and saved in checkpoints; exports omit them.
        """
        return BertForPreTraining(self.config.model, **self.model_options)

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of a model's class besides its shape, by the run's configuration."""
        train = self.config.train
        return {
            "attention_kernel": train.attention_kernel,
            "gradient_checkpointing": train.gradient_checkpointing,
        }

    def flops(self, counts: TokenCounts) -> float:
        """FLOPs of forward and backward of all models of the objective, for speed/mfu: by default BERT's."""
        return training_flops(self.config.model, counts)

    def pretraining_output(self, output: ModelOutput) -> PreTrainingOutput:
        """The PreTrainingOutput (masked LM and next sentence) in the model's output, for the curves of a mixture's
        sources. An objective whose model returns another output overrides it.
        """
        return output

    def facts(self) -> dict[str, str]:
        """Hashes of the objective's further inputs by name: a resume is refused if one has changed."""
        return {}

    def counts(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """This rank's divisors in the order of TERMS, to be summed over the ranks before the first backward."""
        divisors = [self._named("divisors", self.divisors(micro_batch)) for micro_batch in micro_batches]
        return [float(sum(each[name] for each in divisors)) for name in self.TERMS]

    def __call__(self, output: ModelOutput, micro_batch: MicroBatch, totals: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss (scalar), and its sums, float64 (len(NAMES),).

        Args:
            totals: float64, `counts` summed over ranks, in the order of TERMS.
        """
        terms = self._named("terms", self.terms(output, micro_batch))
        for name, term in terms.items():
            if not isinstance(term, Term):
                raise UserError(
                    f"objective: found {type(term).__name__} for {name} in what {type(self).__name__}"
                    ".terms has returned, expected a Term (launch/pretrain/objectives/objective.py)"
                )
        divisors, step_weights = totals.clamp(min=1).float(), self.step_weights(totals)
        parts = []
        for number, name in enumerate(self.TERMS):
            losses, _, weights, _ = terms[name]
            part = (losses if weights is None else losses * weights).sum() / divisors[number]
            parts.append(part if name not in step_weights else step_weights[name] * part)
        loss = reduce(add, parts)
        shares: Mapping[str, Tensor | float] = {}
        if any(term.count is None for term in terms.values()):
            shares = self.divisors(micro_batch)
        counts = {name: shares[name] if term.count is None else term.count for name, term in terms.items()}
        sums = [loss.detach().double()]
        for name in self.TERMS:
            losses, correct, _, _ = terms[name]
            sums += [
                losses.detach().sum(dtype=torch.float64),
                _number(counts[name], loss),
                # NaN marks a term without hits: sums stay NaN, and the curve is omitted.
                _number(math.nan if correct is None else correct.sum(dtype=torch.float64), loss),
            ]
        return loss, torch.stack(sums)

    def step_weights(self, totals: Tensor) -> Mapping[str, float | Tensor]:
        """The weights of terms in the loss of a step with these totals; 1 for terms that are not listed."""
        return self.weights

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Means of the summed terms, by their names in TensorBoard, of terms that had a loss."""
        means, parts = {}, iter(sums[1:])
        for name, loss, count, correct in zip(self.TERMS, parts, parts, parts, strict=True):
            if count:
                means[f"{name}_loss"] = loss / count
                if not math.isnan(correct):
                    means[f"{name}_accuracy"] = correct / count
        return means

    def total(self, means: Mapping[str, float]) -> float:
        """The loss from the means of `scalars`, for evaluations."""
        losses = ((name, means.get(f"{name}_loss")) for name in self.TERMS)
        return sum(self.weights.get(name, 1.0) * loss for name, loss in losses if loss is not None)

    def _named(self, method: str, values: Mapping[str, _Value]) -> Mapping[str, _Value]:
        if values.keys() != set(self.TERMS):
            raise UserError(
                f"objective: found {', '.join(map(str, values)) or 'nothing'} in what "
                f"{type(self).__name__}.{method} has returned, expected its TERMS {', '.join(self.TERMS)}"
            )
        return values


_MOST = 1_000_000  # of a weight or a temperature: far above any in use, and its products stay within fp32


def check_option(name: str, value: object, least: float, most: float = _MOST, *, whole: bool = False) -> None:
    """Raise UserError for an option that is no number, or outside its bounds."""
    kind = "a whole number" if whole else "a number"
    number = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    if not number or whole and not isinstance(value, int):
        raise UserError(f"objective_options.{name}: found {value!r:.60}, expected {kind} from {least:g} to {most:,g}")


def check_standard(config: PretrainConfig, why: str) -> None:
    """Raise UserError for another parametrization than standard, with what stands against it."""
    if config.model.parametrization != "standard":
        raise UserError(
            f"objective: found {config.objective} with model.parametrization {config.model.parametrization}, expected "
            f"standard: {why}"
        )


def _number(value: Tensor | float, like: Tensor) -> Tensor:
    """A number as a float64 tensor () on the device of `like`, without waiting for the device."""
    return value.detach().double() if isinstance(value, Tensor) else like.new_full((), value, dtype=torch.float64)
