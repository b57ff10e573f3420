"""Sums between two lines of metrics."""

import pytest
import torch

from cloze.launch.engine.content import OtherContent
from cloze.launch.training.metric_sums import MetricWindow
from cloze.launch.training.resuming import _window_in


def test_a_window_keeps_the_losses_of_good_steps_and_the_tokens_of_all(monkeypatch):
    monkeypatch.setattr("cloze.launch.system.distributed.reduce_sum", lambda values: values * 2)  # two ranks
    window = MetricWindow(2, 1, torch.device("cpu"))
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    window.add(torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64), zero, 2, 10, 1)
    window.add(torch.tensor([float("nan")] * 3, dtype=torch.float64), one, 2, 20, 2)
    saved = window.values.clone()
    sums = window.take()
    assert (sums.objective, sums.sources) == ([6.0, 8.0], [10.0])
    assert (sums.steps, sums.tokens, sums.padding) == (1.0, 60.0, 6.0)
    assert not window.values.any(), "a new one"
    window.add_saved(saved)
    window.add_saved(torch.ones(3, dtype=torch.float64))  # of a run with other sources
    assert torch.equal(window.values, saved)


@pytest.mark.parametrize(
    "window",
    [
        None,
        torch.zeros(3),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64).expand(1 << 40),
    ],
    ids=["none", "fp32", "nested", "expanded"],
)
def test_sums_of_another_kind_are_not_those_of_a_run(window):
    with pytest.raises(OtherContent, match="window is .*, expected a tensor of float64"):
        _window_in({"window": window})
