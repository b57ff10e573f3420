"""Configuration of `cloze plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cloze.launch.config import MixtureConfig, PretrainConfig
from cloze.launch.config.checks import at_least
from cloze.launch.system.data_sheets import named_sheet
from cloze.launch.tools.planning.assumptions import MASKED_SHARE, NETWORK_GIGABYTES, SHORT_SHARE
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class PlanConfig(PretrainConfig):
    """Estimate, without running it, whether a pretraining run fits, how long it takes and what it costs."""

    data: str | MixtureConfig = ""
    """Folder written by `cloze prepare`, or a mixture of several, whose lengths and masks are used; empty: the fields
    below."""
    output: str = ""
    """Ignored."""
    processes: int | Literal["auto"] = 1
    """Ignored; gpus is used instead."""
    device: str = "this"
    """Name of a GPU in the data sheets; cpu or this: this machine's, as measured by `cloze doctor`."""
    gpus: int | list[int] = 1
    """Processes of the run (world size), each with one device, at least 1; several numbers are compared in a table."""
    tokens: float | None = None
    """Tokens of the run, above 0, from which train.max_steps follows: 100e9; null: train.max_steps counts."""
    gpus_per_machine: int = 8
    """Devices per machine, connected at link_gigabytes, at least 1."""
    link_gigabytes: float | None = None
    """GB/s from a device to the others of its machine, in one direction, above 0; null: as in its data sheet."""
    network_gigabytes: float = NETWORK_GIGABYTES
    """GB/s from a device to other machines, in one direction, above 0: 50 is one card of 400 Gbit/s per device."""
    price_per_hour: float | None = None
    """Price of one device per hour, in any currency, 0 or more; null: no cost is estimated."""
    short_share: float = SHORT_SHARE
    """Without data: share of sequences shorter than the maximum length, uniformly distributed, 0 to 1."""
    masked_share: float = MASKED_SHARE
    """Without data: share of tokens that is predicted, above 0 and at most 1."""
    json: str | None = None
    """File for the estimates as JSON; null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device not in ("this", "cpu"):
            named_sheet(self.device)
        at_least("plan", self, gpus_per_machine=1, price_per_hour=0)
        if not self.counts or min(self.counts) < 1:
            raise UserError(f"plan.gpus: found {self.gpus}, expected 1 or more, or several such numbers")
        if self.tokens is not None and self.train.time_budget_hours is not None:
            raise UserError(
                f"plan.tokens: found {self.tokens:g} with train.time_budget_hours {self.train.time_budget_hours:g}, "
                "expected one of the two"
            )
        for name in ("link_gigabytes", "network_gigabytes", "tokens"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise UserError(f"plan.{name}: found {getattr(self, name)}, expected more than 0")
        if not 0 <= self.short_share <= 1:
            raise UserError(f"plan.short_share: found {self.short_share}, expected 0 to 1")
        if not 0 < self.masked_share <= 1:
            raise UserError(f"plan.masked_share: found {self.masked_share}, expected more than 0 and at most 1")
        if not self.data and self.train.sequence_length is None:
            raise UserError(
                "plan: found neither data nor train.sequence_length, expected one of them: how long the "
                "sequences are; add --train.sequence_length 128"
            )

    @property
    def counts(self) -> list[int]:
        """The numbers of GPUs, ascending, each once."""
        return sorted(set(self.gpus)) if isinstance(self.gpus, list) else [self.gpus]
