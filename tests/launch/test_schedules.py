"""Schedules against transformers' own, which are written independently."""

import pytest
import torch
from transformers import optimization

from launch.config import ScheduleConfig
from launch.schedules import multiplier, warmup_steps

STEPS, WARMUP = 137, 23


def reference(name: str):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return {
        "linear": lambda: optimization.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "cosine": lambda: optimization.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "constant": lambda: optimization.get_constant_schedule_with_warmup(optimizer, WARMUP),
        "polynomial": lambda: optimization.get_polynomial_decay_schedule_with_warmup(
            optimizer, WARMUP, STEPS, lr_end=0.25, power=0.5),
        "inverse_sqrt": lambda: optimization.get_inverse_sqrt_schedule(optimizer, WARMUP),
        "wsd": lambda: optimization.get_wsd_schedule(
            optimizer, WARMUP, num_decay_steps=27, num_training_steps=STEPS, decay_type="linear"),
    }[name]()


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "polynomial", "inverse_sqrt", "wsd"])
def test_every_step_equals_transformers(name):
    config = ScheduleConfig(name=name, warmup_steps=WARMUP, decay_share=0.2,
                            final_share=0.25 if name == "polynomial" else 0.0)
    scheduler = reference(name)
    for step in range(STEPS):
        assert multiplier(config, step, STEPS) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12), step
        scheduler.optimizer.step()
        scheduler.step()


def test_warmup_by_share_and_none_at_all():
    assert warmup_steps(ScheduleConfig(warmup_share=0.06), 250) == 15
    assert multiplier(ScheduleConfig(warmup_steps=0), 0, 10) == 1.0
    assert multiplier(ScheduleConfig(warmup_steps=0, final_share=0.1), 10, 10) == pytest.approx(0.1)
    # Beyond the end the rate stays where it ended.
    assert multiplier(ScheduleConfig(warmup_steps=0), 99, 10) == 0.0


def test_nvidias_polynomial_drops_at_the_end_of_its_warmup():
    """The published recipes: phase 1 falls to 0.846 of the peak, phase 2 to 0.934."""
    for steps, share, expected in ((7038, 0.2843, 0.846), (1563, 0.128, 0.934)):
        config = ScheduleConfig(name="poly_nvidia", warmup_share=share, power=0.5)
        end = warmup_steps(config, steps)
        assert multiplier(config, end - 1, steps) == pytest.approx(1, abs=0.01)
        assert multiplier(config, end, steps) == pytest.approx(expected, abs=5e-4)
        assert multiplier(config, steps, steps) == 0


def test_exponential_steps():
    config = ScheduleConfig(name="exponential", warmup_steps=10, factor=0.9, factor_steps=250)
    assert [multiplier(config, step, 1000) for step in (10, 259, 260, 509, 510)] == pytest.approx(
        [1, 1, 0.9, 0.9, 0.81])
