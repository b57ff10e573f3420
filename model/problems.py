"""`HeadConfig`: what a head for fine-tuning predicts; and the problems, with their losses and probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cloze.model.config import ModelError, check_kinds
from cloze.model.heads import NO_LABEL, class_losses

Losses = tuple[Tensor, Tensor]


class Problem:
    """What the scores (B, outputs) of a sentence-level head mean; by default one class of several.

    Labels are as in `BertForSequenceClassification.forward`.
    """

    in_transformers: ClassVar[bool] = False
    """Whether its classes can say it; a head that they can't say is exported in our own format."""
    problem_type: ClassVar[str | None] = None
    """Its name in their config.json; None: nothing is said there."""
    answer: ClassVar[Literal["class", "labels", "numbers"]] = "class"
    """What a prediction is: the most probable label; all with a probability above `HeadConfig.threshold`; the
    numbers themselves."""

    def check(self, head: HeadConfig) -> None:
        """Raise ModelError if labels or columns of the head do not fit."""
        if head.columns:
            raise ModelError(
                f"head.columns: found {len(head.columns)} with head.problem = {head.problem}, expected none"
            )

    def num_outputs(self, head: HeadConfig) -> int:
        return len(head.labels)

    def losses(self, head: HeadConfig, scores: Tensor, labels: Tensor) -> Losses:
        """fp32 losses (B,) or (B, columns), 0 where there is no label; and the number of labels, () or (columns,)."""
        return class_losses(scores, labels)[0], (labels != NO_LABEL).sum()

    def probabilities(self, head: HeadConfig, scores: Tensor) -> dict[str | None, Tensor]:
        """Probabilities (numbers of a regression) (B, classes) in the scores' dtype, by label column; None: the only
        one.
        """
        return {None: scores.softmax(-1)}


class OneClass(Problem):
    """One class of several."""

    in_transformers = True
    problem_type = "single_label_classification"


class IndependentLabels(Problem):
    """A sigmoid for each label."""

    in_transformers = True
    problem_type = "multi_label_classification"
    answer = "labels"

    def losses(self, head: HeadConfig, scores: Tensor, labels: Tensor) -> Losses:
        targets = labels.view(scores.shape).float()
        losses = nn.functional.binary_cross_entropy_with_logits(scores.float(), targets, reduction="none")
        return _one_each(losses)

    def probabilities(self, head: HeadConfig, scores: Tensor) -> dict[str | None, Tensor]:
        return {None: scores.sigmoid()}


class Regression(Problem):
    """A number for each target."""

    in_transformers = True
    problem_type = "regression"
    answer = "numbers"

    def losses(self, head: HeadConfig, scores: Tensor, labels: Tensor) -> Losses:
        targets = labels.view(scores.shape).float()
        return _one_each(nn.functional.mse_loss(scores.float(), targets, reduction="none"))

    def probabilities(self, head: HeadConfig, scores: Tensor) -> dict[str | None, Tensor]:
        return {None: scores}


class BoundedScore(Problem):
    """One number that is read through a sigmoid, as in transformers where nothing is said of a single label (a
    cross-encoder's).
    """

    in_transformers = True
    answer = "numbers"
    losses = Regression.losses

    def check(self, head: HeadConfig) -> None:
        super().check(head)
        if len(head.labels) != 1:
            raise ModelError(f"head.labels: found {len(head.labels)} with head.problem = {head.problem}, expected one")

    def probabilities(self, head: HeadConfig, scores: Tensor) -> dict[str | None, Tensor]:
        return {None: scores.sigmoid()}


class ClassOfEachColumn(Problem):
    """One class in each of several named columns: each has a softmax of its own, losses are summed."""

    def check(self, head: HeadConfig) -> None:
        if not head.columns:
            raise ModelError(f"head.columns: found none with head.problem = {head.problem}, expected at least one")

    def num_outputs(self, head: HeadConfig) -> int:
        return sum(len(classes) for _, classes in head.columns)

    def losses(self, head: HeadConfig, scores: Tensor, labels: Tensor) -> Losses:
        parts = enumerate(self._split(head, scores).values())
        columns = [class_losses(part, labels[:, column])[0] for column, part in parts]
        return torch.stack(columns, dim=1), (labels != NO_LABEL).sum(0)

    def probabilities(self, head: HeadConfig, scores: Tensor) -> dict[str | None, Tensor]:
        return {name: part.softmax(-1) for name, part in self._split(head, scores).items()}

    def _split(self, head: HeadConfig, scores: Tensor) -> dict[str, Tensor]:
        parts = scores.split([len(classes) for _, classes in head.columns], dim=-1)
        return {name: part for (name, _), part in zip(head.columns, parts, strict=True)}


def _one_each(losses: Tensor) -> Losses:
    """One loss for each example from those of its outputs (B, outputs)."""
    return losses.mean(1), torch.tensor(len(losses), device=losses.device)


PROBLEMS: dict[str, Problem] = {
    "single_label": OneClass(),
    "multi_label": IndependentLabels(),
    "regression": Regression(),
    "score": BoundedScore(),
    "columns": ClassOfEachColumn(),
}


@dataclass(frozen=True)
class HeadConfig:
    """What a head predicts: its problem type and labels.

    Raises:
        ModelError: for unknown values and contradictions.
    """

    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    """Names of the classes (single_label), of the independent labels (multi_label) or of the targets (regression)."""
    problem: str = "single_label"
    """An entry of `PROBLEMS`."""
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """columns only: (name, its classes) of each label column."""
    pooling: Literal["pooler", "cls", "mean", "max", "pooled_mean", "late"] = "pooler"
    """What a sentence-level head reads: the pooler of the first token, or one of the tokens' vectors; pooled_mean: the
    pooler of their mean; late: the mean of the pooler of each. Without a pooler in the model these are cls and mean.
    """
    layers: Literal["last", "last_four", "weighted"] = "last"
    """The encoder layers that a head reads: the last; the last four side by side; a learned weighted sum of all
    (Devlin et al. 2019, table 7; Peters et al. 2018, equation 1).
    """

    pieces: Literal["none", "max", "mean", "attention"] = "none"
    """Over what a text is classified: one sequence; or all pieces of a long one, whose vectors become one by their
    maximum, their mean, or a sum weighted by learned attention.
    """
    piece_length: int = 0
    """Tokens of a piece, special tokens included."""
    piece_step: int = 0
    """Tokens from the start of one piece to the next."""

    def __post_init__(self) -> None:
        check_kinds("head", self)
        if self.pieces != "none" and not 0 < self.piece_step <= self.piece_length - 2:
            raise ModelError(
                f"head.piece_step: found {self.piece_step} with head.piece_length = {self.piece_length}, "
                "expected 1 to two less, so that every token is in a piece"
            )
        if self.layers != "last" and self.pooling in ("pooler", "pooled_mean", "late"):
            raise ModelError(
                f"head.layers: found {self.layers} with head.pooling = {self.pooling}, expected cls, mean or max: "
                "the pooler was trained on the last layer alone"
            )
        if self.problem not in PROBLEMS:
            raise ModelError(f"head.problem: found {self.problem[:40]!r}, expected one of {', '.join(PROBLEMS)}")
        PROBLEMS[self.problem].check(self)
        if self.num_outputs < 1 or any(not classes for _, classes in self.columns):
            raise ModelError("head.labels: found none, expected at least one; give the labels")
        for names in (self.labels, [name for name, _ in self.columns], *(classes for _, classes in self.columns)):
            if not all(isinstance(name, str) for name in names):
                raise ModelError(f"head.labels: found {str(names)[:60]}, expected texts")
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise ModelError(f"head.labels: found {twice[0]!r} twice, expected names that differ; rename one")

    threshold: ClassVar[float] = 0.5
    """Probability above which an independent label is predicted."""

    @property
    def classes(self) -> dict[str | None, tuple[str, ...]]:
        """The labels of each label column; None: the only one."""
        return dict(self.columns) or {None: self.labels}

    @property
    def answer(self) -> str:
        """What a prediction is: `Problem.answer`."""
        return PROBLEMS[self.problem].answer

    @property
    def num_outputs(self) -> int:
        """Number of scores per example."""
        return PROBLEMS[self.problem].num_outputs(self)

    def losses(self, scores: Tensor, labels: Tensor) -> Losses:
        """As `Problem.losses`."""
        return PROBLEMS[self.problem].losses(self, scores, labels)

    def probabilities(self, scores: Tensor) -> dict[str | None, Tensor]:
        """As `Problem.probabilities`."""
        return PROBLEMS[self.problem].probabilities(self, scores)
