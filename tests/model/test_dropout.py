"""Masks are functions of their key, fair, and independent of one another."""

import pytest
import torch

from cloze.model import dropout as module
from cloze.model.dropout import DropoutKey, dropout, keep_masks, keep_scale, row_bits

CPU = torch.device("cpu")


def keep_mask(shape: tuple[int, int], probability: float, key: int) -> torch.Tensor:
    return keep_masks(row_bits([key], shape[0], CPU), shape[1], probability, torch.bool)[0]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_are_fair_and_keep_the_mean(probability):
    keep = keep_mask((1000, 1001), probability, 3)
    # 5 standard deviations of a million coin tosses
    assert abs(keep.double().mean() - (1 - probability)) < 5 * (probability * (1 - probability) / 1e6) ** 0.5
    outputs = dropout(torch.ones(1000, 1001), probability, 3)
    assert outputs.unique().tolist() == pytest.approx([0.0, keep_scale(probability)])
    assert abs(outputs.mean() - 1) < 0.02


def test_masks_of_neighbouring_keys_are_uncorrelated():
    keys = [DropoutKey(seed, layer).at(place) for seed in (0, 1) for layer in (0, 1) for place in (0, 1)]
    assert len(set(keys)) == len(keys)
    masks = torch.stack([keep_mask((100, 1000), 0.5, key).flatten().double() for key in keys])
    correlation = torch.corrcoef(masks) - torch.eye(len(keys))
    assert correlation.abs().max() < 0.02  # 6 standard deviations
    for shift in (1, 2, 3, 4):
        rolled = torch.corrcoef(torch.stack((masks[0], masks[0].roll(shift))))
        assert rolled[0, 1].abs() < 0.02


def test_a_mask_depends_on_its_key_alone():
    first = keep_mask((33, 7), 0.3, 5)
    torch.manual_seed(1)
    keep_mask((100, 1), 0.3, 6)
    assert torch.equal(first, keep_mask((33, 7), 0.3, 5))


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_no_two_rows_or_columns_of_a_mask_are_correlated(probability):
    """All pairs of 256 columns, over 32,768 rows, and of 512 rows, over the columns."""
    mask = keep_mask((1 << 15, 256), 1 - probability, DropoutKey(7, 3).at(2))
    values = (mask.float() - probability) / (probability * (1 - probability)) ** 0.5
    for table in (values, values[:512].T):
        products = table.T @ table / len(table) ** 0.5
        products.fill_diagonal_(0)
        # Of 32,640 normal numbers one lies above 6 once in 15,000 times; sums of 256 skewed ones have longer tails.
        assert products.abs().max() < (6 if len(table) > 256 else 10)
        assert products.square().mean().sqrt() == pytest.approx(1, abs=0.02)


def test_bits_of_an_element_are_spread_evenly():
    """Both elements of a pair, and each value of their sixteen bits."""
    bits = row_bits([11], 4096, CPU)
    counts = [len(bits[0]) * 256 - int(keep_masks(bits, 256, share / 16, torch.bool)[0].sum()) for share in range(16)]
    assert torch.tensor(counts).diff() == pytest.approx([1 << 16] * 15, abs=5 * (1 << 8))
    for half in (0, 1):
        kept = keep_masks(bits, 512, 0.25, torch.bool)[0][:, half::2].double().mean()
        assert kept == pytest.approx(0.75, abs=5 * (0.1875 / (4096 * 256)) ** 0.5)


def test_masks_are_the_same_compiled_in_pieces_at_once_and_in_every_dtype(monkeypatch):
    """On a CPU they are made in pieces, on a GPU at once, in compiled code element by element."""
    bits = row_bits([3, (1 << 62) + 1, -5], 50, CPU)
    compiled = torch.compile(keep_masks, dynamic=True, backend="aot_eager")
    for width in (1, 7, 64):
        whole = keep_masks(bits, width, 0.3, torch.bool)
        check_forms(bits, whole, compiled, monkeypatch)


def check_forms(bits, whole, compiled, monkeypatch):
    """Masks of every form against those that were made at once."""
    width = whole[0].shape[1]
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.float16):
        found = [compiled(bits, width, 0.3, dtype)]
        for chunk in (70, None):
            monkeypatch.setitem(module._CHUNK_PAIRS, False, chunk)
            found.append(keep_masks(bits, width, 0.3, dtype))
        for masks in found:
            for mask, expected in zip(masks, whole, strict=True):
                assert mask.dtype == dtype and mask.shape == (50, width) and torch.equal(mask.bool(), expected)
    assert len({tuple(mask.flatten().tolist()) for mask in whole}) == 3


def test_masks_are_those_of_earlier_runs():
    """A checkpoint may be older than the code: what is dropped after it was decided then."""
    assert keep_mask((2, 16), 0.5, 123456789012345).int().tolist() == [
        [1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0],
    ]


def test_a_probability_next_to_nothing_drops_nothing():
    bits = row_bits([1], 64, CPU)
    assert all(keep_masks(bits, 64, 1e-6, dtype)[0].all() for dtype in (torch.bool, torch.bfloat16))


def test_nothing_is_dropped_without_a_key_or_a_probability():
    inputs = torch.randn(5)
    assert dropout(inputs, 0.5, None) is inputs and dropout(inputs, 0.0, 1) is inputs
