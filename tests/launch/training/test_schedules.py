"""Schedules against transformers' own, which are written independently."""

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import optimization

from cloze.launch.config import ScheduleConfig
from cloze.launch.training.schedules import SHAPES, multiplier
from tests.launching import ROOT
from tests.tables import assert_same_names

STEPS, WARMUP = 137, 23


def reference(name: str):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return {
        "linear": lambda: optimization.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "cosine": lambda: optimization.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "constant": lambda: optimization.get_constant_schedule_with_warmup(optimizer, WARMUP),
        "polynomial": lambda: optimization.get_polynomial_decay_schedule_with_warmup(
            optimizer, WARMUP, STEPS, lr_end=0.25, power=0.5
        ),
        "inverse_sqrt": lambda: optimization.get_inverse_sqrt_schedule(optimizer, WARMUP),
        "wsd": lambda: optimization.get_wsd_schedule(
            optimizer, WARMUP, num_decay_steps=27, num_training_steps=STEPS, decay_type="linear"
        ),
    }[name]()


OF_TRANSFORMERS = ("linear", "cosine", "constant", "polynomial", "inverse_sqrt", "wsd")
# As published, after the warmup.
BY_HAND = {
    "poly_nvidia": lambda step: 0.25 + 0.75 * (1 - step / STEPS) ** 0.5,
    "exponential": lambda step: 0.9 ** ((step - WARMUP) // 20),
}


def config_of(name: str) -> ScheduleConfig:
    final_share = 0.25 if name in ("polynomial", *BY_HAND) else 0.0  # transformers' others have none
    return ScheduleConfig(name=name, warmup_steps=WARMUP, decay_share=0.2, final_share=final_share, factor_steps=20)


def test_every_schedule_is_legal_drawn_and_compared_with_a_reference():
    allowed = get_args(get_type_hints(ScheduleConfig)["name"])
    assert_same_names(SHAPES, allowed, "ScheduleConfig.name in launch/config/optimization.py")
    assert_same_names(SHAPES, {*OF_TRANSFORMERS, *BY_HAND}, "OF_TRANSFORMERS or BY_HAND in this file, a reference")
    drawing = (ROOT / "docs" / "draw_schedules.py").read_text(encoding="utf-8")
    missing = [name for name in SHAPES if f'ScheduleConfig(name="{name}"' not in "".join(drawing.split())]
    assert not missing, "to be drawn by docs/draw_schedules.py"


@pytest.mark.parametrize("name", SHAPES)
def test_the_end_is_at_final_share_or_above_zero(name):
    """Only what falls to 0 can be scaled to end elsewhere."""
    config = ScheduleConfig(name=name, warmup_steps=WARMUP, final_share=0.25)
    end, unscaled = multiplier(config, STEPS, STEPS), multiplier(replace(config, final_share=0), STEPS, STEPS)
    if SHAPES[name].falls_to_zero:
        assert (end, unscaled) == (0.25, 0), "falls_to_zero=False in SHAPES, for a schedule that ends above 0"
    else:
        assert end == unscaled > 0, "a schedule that ends at 0 is one that falls_to_zero"


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_every_step_equals_transformers(name):
    config, scheduler = config_of(name), reference(name)
    for step in range(STEPS):
        assert multiplier(config, step, STEPS) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12), step
        scheduler.optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", BY_HAND)
def test_every_step_equals_the_published_formula(name):
    config = config_of(name)
    for step in range(STEPS):
        expected = step / WARMUP if step < WARMUP else BY_HAND[name](step)
        assert multiplier(config, step, STEPS) == pytest.approx(expected, abs=1e-12), step


def test_warmup_by_share_and_none_at_all():
    assert ScheduleConfig(warmup_share=0.06).warmup_in(250) == 15
    assert multiplier(ScheduleConfig(warmup_steps=0), 0, 10) == 1.0
    assert multiplier(ScheduleConfig(warmup_steps=0, final_share=0.1), 10, 10) == pytest.approx(0.1)
    # Beyond the end the rate stays where it ended.
    assert multiplier(ScheduleConfig(warmup_steps=0), 99, 10) == 0.0


def test_nvidias_polynomial_drops_at_the_end_of_its_warmup():
    """The published recipes: phase 1 falls to 0.846 of the peak, phase 2 to 0.934."""
    for steps, share, expected in ((7038, 0.2843, 0.846), (1563, 0.128, 0.934)):
        config = ScheduleConfig(name="poly_nvidia", warmup_share=share, power=0.5)
        end = config.warmup_in(steps)
        assert multiplier(config, end - 1, steps) == pytest.approx(1, abs=0.01)
        assert multiplier(config, end, steps) == pytest.approx(expected, abs=5e-4)
        assert multiplier(config, steps, steps) == 0


def test_the_bert_release_and_its_second_phase_on_one_line():
    """Its rate is 1 - step / 1M from step 0 on (google-research/bert `optimization.py`); 900k steps and then 100k."""
    first = ScheduleConfig(name="poly_nvidia", power=1.0, warmup_steps=10_000, final_share=0.1)
    second = ScheduleConfig(name="poly_nvidia", power=1.0, warmup_steps=0)
    for step in (0, 1, 9_999, 10_000, 500_000, 899_999):
        expected = step / 10_000 if step < 10_000 else 1 - step / 1_000_000
        assert multiplier(first, step, 900_000) == pytest.approx(expected)
    for step in (900_000, 950_000, 1_000_000):
        assert 0.1 * multiplier(second, step - 900_000, 100_000) == pytest.approx(1 - step / 1_000_000)


def test_wsd_down_by_the_root():
    """transformers' own, 1 - sqrt."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = optimization.get_wsd_schedule(
        optimizer, WARMUP, num_decay_steps=27, num_training_steps=STEPS, decay_type="1-sqrt"
    )
    config = ScheduleConfig(name="wsd", warmup_steps=WARMUP, decay_share=0.2, decay_shape="sqrt")
    for step in range(STEPS):
        assert multiplier(config, step, STEPS) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        scheduler.step()


def test_a_triangle_as_in_cramming():
    """cramming `schedulers.py`: from a quarter of the peak up to it over three quarters of the budget, then to zero."""
    config = ScheduleConfig(name="linear", warmup_share=0.75, initial_share=0.25)
    for at in (0, 100, 1000, 75_000, 80_000, 100_000):
        x = at / 100_000
        assert multiplier(config, at, 100_000) == pytest.approx(min(0.25 + x * 0.75 / 0.75, 4 - 4 * x))


def test_warmup_by_tokens():
    config = ScheduleConfig(name="wsd", warmup_tokens=1000)
    assert [multiplier(config, step, 100, tokens) for step, tokens in ((0, 0), (7, 250), (9, 1000), (50, 9999))] == [
        0,
        0.25,
        1,
        1,
    ]
    assert multiplier(config, 95, 100, 99999) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "poly_nvidia", "wsd"])
def test_a_time_budget_ends_with_the_rate_at_zero(name):
    """24 hours in seconds: 6% of warmup, and nothing is left once the time is used up, also when a step overshoots."""
    config, day = ScheduleConfig(name=name, warmup_share=0.06), 24 * 3600.0
    assert multiplier(config, 0.03 * day, day) == pytest.approx(0.5)
    assert 0 < multiplier(config, 0.999 * day, day) < 0.06
    assert multiplier(config, day, day) == multiplier(config, day + 5, day) == 0
