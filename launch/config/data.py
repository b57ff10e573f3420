"""Configuration of the data of a pretraining run: one prepared folder, or a mixture of several."""

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config.training import check_ends
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class DataSource:
    """A prepared folder of a mixture."""

    path: str
    """Folder written by `cloze prepare`."""
    name: str | None = None
    """Name of the source in curves and phases: letters, digits, dots, dashes and underscores; null: the last part of
    path."""
    weight: float | None = None
    """Share of the training data relative to the other sources, above 0; null: by size, or by phases."""

    @property
    def label(self) -> str:
        """The name that is used."""
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class DataPhase:
    """Shares of the sources for a part of the run."""

    weights: dict[str, float]
    """Share of each source by its name, relative to the others, 0 or more; a source that is not named has share 0."""
    until_tokens: int | None = None
    """Tokens since the start of the run at which the phase ends; null, for the last phase: at the end of the run."""


@dataclass(frozen=True)
class MixtureConfig:
    """Several prepared folders with the same tokenizer that a run mixes during training."""

    sources: list[DataSource] = field(default_factory=list)
    """The folders: each with a path, and optionally a name and a weight."""
    proportions: Literal["tokens", "samples"] = "tokens"
    """Unit of the shares: tokens, or samples regardless of their lengths."""
    temperature: float | None = None
    """Without weights: shares are proportional to size^(1 / temperature), above 0; 1 (or null): to size; larger values
    give small sources (languages) more; 3.3 is XLM-R's exponent 0.3."""
    phases: list[DataPhase] = field(default_factory=list)
    """Shares that change during the run, instead of weights: consecutive phases."""

    def check(self) -> None:
        """Raise UserError for fields that contradict each other. Not in `__post_init__`: the parser tries several
        types for `data` and would replace the message by its own.
        """
        if not self.sources:
            raise UserError("data.sources: found none, expected a list of prepared folders, each with a path")
        labels = [source.label for source in self.sources]
        times = Counter(labels)
        for label in labels:
            if not re.fullmatch(r"[\w.-]+", label):
                raise UserError(
                    f"data.sources: found the name {label!r}, expected letters, digits, dots, dashes and "
                    "underscores; give the source another name"
                )
            if times[label] > 1:
                raise UserError(
                    f"data.sources: found two that are called {label}, expected a name for each; give them names"
                )
        weights = [source.weight for source in self.sources]
        for label, weight in zip(labels, weights, strict=True):
            if weight is not None and not 0 < weight < math.inf:
                raise UserError(f"data.sources: found weight {weight} of {label}, expected a number above 0")
        given = sum(weight is not None for weight in weights)
        if given not in (0, len(weights)):
            raise UserError(
                f"data.sources: found {given} weights for {len(weights)} sources, expected one for each, or none"
            )
        ways = {
            "weights of data.sources": given > 0,
            "data.phases": bool(self.phases),
            "data.temperature": self.temperature is not None,
        }
        if sum(ways.values()) > 1:
            found = " and ".join(name for name, used in ways.items() if used)
            raise UserError(f"data: found {found}, expected one of them: each says all shares")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UserError(f"data.temperature: found {self.temperature}, expected a number above 0")
        self._check_phases(times.keys())

    def _check_phases(self, labels: Collection[str]) -> None:
        for phase in self.phases:
            for name, weight in phase.weights.items():
                if name not in labels:
                    raise UserError(f"data.phases: found the source {name!r}, expected one of {', '.join(labels)}")
                if not 0 <= weight < math.inf:
                    raise UserError(f"data.phases: found weight {weight} of {name}, expected 0 or more")
            if not any(phase.weights.values()):
                raise UserError("data.phases: found a phase without a weight above 0, expected one at least")
        check_ends("data.phases", [phase.until_tokens for phase in self.phases])
