"""What all objectives ask of their options."""

import pytest

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.objectives.distillation import Distillation
from cloze.launch.pretrain.objectives.replaced_tokens import ReplacedTokens
from cloze.launch.pretrain.objectives.span_boundary import SpanBoundary
from cloze.pipeline.errors import UserError


@pytest.mark.parametrize(
    "made, given",
    [
        (SpanBoundary, {"longest": 10**9}),
        (SpanBoundary, {"boundary": 10**30}),
        (ReplacedTokens, {"generator_size": 1e308}),
        (ReplacedTokens, {"generator_layers": 1000}),
        (ReplacedTokens, {"temperature": float("nan")}),
        (ReplacedTokens, {"detection": True}),
        (Distillation, {"teacher": "t", "temperature": 1e300}),
        (Distillation, {"teacher": "t", "masked": 10**30}),
    ],
)
def test_numbers_of_objectives_are_bounded(made, given):
    """Before, tables of 10^9 rows were made, and numbers that no tensor holds ended in a traceback."""
    with pytest.raises(
        UserError, match=f"objective_options.{list(given)[-1]}: found .*, expected a .*number from .* to"
    ):
        made(PretrainConfig(data="d", output="o"), **given)
