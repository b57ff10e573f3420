"""Each metric says in which direction it improves."""

import pytest

from cloze.launch.config import EvaluationConfig
from cloze.launch.config.metrics import lower_is_better
from cloze.launch.pretrain.objectives.table import OBJECTIVES


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_of_objectives_are_to_fall_and_accuracies_to_rise(objective):
    for term in OBJECTIVES[objective].load().TERMS:
        assert lower_is_better(f"{term}_loss"), f"{term}_loss by MEASURES in launch/config/metrics.py"
        assert not lower_is_better(f"{term}_accuracy/wiki"), f"{term}_accuracy by MEASURES"


@pytest.mark.parametrize(
    ("curve", "better", "worse"),
    [
        ("loss", 1.0, 2.0),
        ("mlm_loss/wiki", 1.0, 2.0),
        ("mlm_perplexity", 1.0, 2.0),
        ("mean_squared_error", 1.0, 2.0),
        ("next_sentence_accuracy", 0.9, 0.5),
        ("f1", 0.9, 0.5),
        ("my_own", 2.0, 1.0),
        ("my_error", 1.0, 2.0),
        ("accuracy_topic", 0.9, 0.5),
        ("accuracy_error", 0.9, 0.5),  # of a column of that name
        ("mean_squared_error_fluency", 1.0, 2.0),
        ("mean_squared_error_accuracy/test", 1.0, 2.0),
        ("pearson_mean_squared_error", 0.9, 0.5),
        ("lossless", 2.0, 1.0),
        ("myloss", 1.0, 2.0),
        ("calibration-error/wiki", 1.0, 2.0),
    ],
)
def test_directions(curve, better, worse):
    config = EvaluationConfig(metric=curve)
    assert config.is_better(better, worse) and not config.is_better(worse, better)
    assert not config.is_better(better, better)
