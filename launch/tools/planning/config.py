"""Configuration of `cloze plan`."""

from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config import MixtureConfig, PretrainConfig
from cloze.launch.system.data_sheets import named_sheet
from cloze.launch.tools.planning.assumptions import MASKED_SHARE, NETWORK_GIGABYTES, SHORT_SHARE
from cloze.pipeline.bounds import POSITIVE_SHARE, SHARE, bounds
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
    tokens: float | None = field(default=None, metadata=bounds(above=0))
    """Tokens of the run, from which train.max_steps follows: 100e9; null: train.max_steps counts."""
    gpus_per_machine: int = field(default=8, metadata=bounds(at_least=1))
    """Devices per machine, connected at link_gigabytes."""
    link_gigabytes: float | None = field(default=None, metadata=bounds(above=0))
    """GB/s from a device to the others of its machine, in one direction; null: as in its data sheet."""
    network_gigabytes: float = field(default=NETWORK_GIGABYTES, metadata=bounds(above=0))
    """GB/s from a device to other machines, in one direction: 50 is one card of 400 Gbit/s per device."""
    price_per_hour: float | None = field(default=None, metadata=bounds(at_least=0))
    """Price of one device per hour, in any currency; null: no cost is estimated."""
    short_share: float = field(default=SHORT_SHARE, metadata=SHARE)
    """Without data: share of sequences shorter than the maximum length, uniformly distributed."""
    masked_share: float = field(default=MASKED_SHARE, metadata=POSITIVE_SHARE)
    """Without data: share of tokens that is predicted."""
    json: str | None = None
    """File for the estimates as JSON; null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device not in ("this", "cpu"):
            named_sheet(self.device)
        if not self.counts or min(self.counts) < 1:
            raise UserError(f"plan.gpus: found {self.gpus}, expected 1 or more, or several such numbers")
        if self.tokens is not None and self.train.time_budget_hours is not None:
            raise UserError(
                f"plan.tokens: found {self.tokens:g} with train.time_budget_hours {self.train.time_budget_hours:g}, "
                "expected one of the two"
            )
        if not self.data and self.train.sequence_length is None:
            raise UserError(
                "plan: found neither data nor train.sequence_length, expected one of them: how long the "
                "sequences are; add --train.sequence_length 128"
            )

    @property
    def counts(self) -> list[int]:
        """The numbers of GPUs, ascending, each once."""
        return sorted(set(self.gpus)) if isinstance(self.gpus, list) else [self.gpus]
