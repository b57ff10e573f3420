"""Masks are functions of their key, fair, and independent of one another."""

import pytest
import torch

from cloze.model.dropout import DropoutKey, dropout, keep_mask, keep_scale

CPU = torch.device("cpu")


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_are_fair_and_keep_the_mean(probability):
    keep = keep_mask((1000, 1001), probability, 3, CPU)
    # 5 standard deviations of a million coin tosses
    assert abs(keep.double().mean() - (1 - probability)) < 5 * (probability * (1 - probability) / 1e6) ** 0.5
    outputs = dropout(torch.ones(1000, 1001), probability, 3)
    assert outputs.unique().tolist() == pytest.approx([0.0, keep_scale(probability)])
    assert abs(outputs.mean() - 1) < 0.02


def test_masks_of_neighbouring_keys_are_uncorrelated():
    keys = [DropoutKey(seed, layer).at(place) for seed in (0, 1) for layer in (0, 1) for place in (0, 1)]
    assert len(set(keys)) == len(keys)
    masks = torch.stack([keep_mask((100_000,), 0.5, key, CPU).double() for key in keys])
    correlation = torch.corrcoef(masks) - torch.eye(len(keys))
    assert correlation.abs().max() < 0.02  # 6 standard deviations
    for shift in (1, 2, 3, 4):
        rolled = torch.corrcoef(torch.stack((masks[0], masks[0].roll(shift))))
        assert rolled[0, 1].abs() < 0.02


def test_a_mask_depends_on_its_key_alone():
    first = keep_mask((33, 7), 0.3, 5, CPU)
    torch.manual_seed(1)
    keep_mask((100,), 0.3, 6, CPU)
    assert torch.equal(first, keep_mask((33, 7), 0.3, 5, CPU))


def test_nothing_is_dropped_without_a_key_or_a_probability():
    inputs = torch.randn(5)
    assert dropout(inputs, 0.5, None) is inputs and dropout(inputs, 0.0, 1) is inputs
