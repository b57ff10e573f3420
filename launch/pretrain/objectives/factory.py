"""Makes the objective of a run: of the table, or a user's own by its dotted name."""

import hashlib
import inspect
from pathlib import Path

from cloze.launch.config import PretrainConfig
from cloze.launch.config.metrics import first_measure
from cloze.launch.pretrain.objectives.masked import MaskedAndNextTokens, MaskedTokens
from cloze.launch.pretrain.objectives.objective import Objective
from cloze.launch.pretrain.objectives.table import OBJECTIVES
from cloze.launch.system.plugins import make, own_class
from cloze.pipeline.errors import UserError


def make_objective(config: PretrainConfig) -> Objective:
    """The objective that the configuration names, with its options.

    Raises:
        UserError: there is no such objective, the class is not an Objective, lacks a method, or does not take the
        options.
    """
    if "." in config.objective:
        kind = own_class("objective", config.objective, Objective, "TERMS")  # type: ignore[type-abstract]  # a base
    elif config.objective in OBJECTIVES:
        kind = OBJECTIVES[config.objective].load()
    else:
        raise UserError(
            f"objective: found {config.objective!r}, expected {' or '.join(OBJECTIVES)}, or the dotted "
            "name of a class of your own, as my_module.MyObjective"
        )
    for name, found in (
        ("masking.next_tokens_until", config.masking.next_tokens_until),
        ("train.causal_share", config.train.causal_share),
    ):
        if not found:
            continue
        if kind not in (MaskedTokens, MaskedAndNextTokens):
            raise UserError(f"{name}: found {found} with objective {config.objective}, expected 0, or objective masked")
        if size := config.model.convolution_size:
            raise UserError(
                f"{name}: found {found} with model.convolution_size {size}, which sees the next token, expected 0"
            )
        kind = MaskedAndNextTokens
    for term in kind.TERMS:
        if measure := first_measure(term):
            raise UserError(
                f"objective: found the term {term!r} in {kind.__name__}.TERMS, expected a name that does not begin "
                f"with {measure}: its curve {term}_loss would count as one of {measure}"
            )
    return make("objective", config.objective, kind, config, config.objective_options)


def objective_facts(objective: Objective) -> dict[str, str]:
    """Facts that a resume compares: those of the objective, and the SHA-256 of the file of a user's own objective."""
    facts, kind = objective.facts(), type(objective)
    if kind.__module__ not in {entry.reference.partition(":")[0] for entry in OBJECTIVES.values()}:
        facts["objective_source"] = hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    return facts
