"""Optimizers that need whole tensors, divided among ranks: against the same without division, and one process."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from cloze.launch.engine.division import owners, update_cost
from cloze.model.config import BertConfig
from tests.contract import RATES, WHOLE, division_main, equal_tensors, loads_main, plain_division
from tests.forked import ForkedRun

# LAMB and StableAdamW after five steps, with gradients that were added in another order.
TOLERANCE = 2e-5


def _run(main, world_size: int, folder) -> list[dict]:
    run = ForkedRun([], world_size, main)
    output, _ = run.communicate(300)
    assert run.returncode == 0, output
    return [torch.load(folder / f"{rank}-of-{world_size}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format)
def ranks(request, tmp_path_factory):
    """The folder, and what each rank found."""
    folder = tmp_path_factory.mktemp("division")
    return folder, _run(partial(division_main, folder), request.param, folder)


def _merged(found: list[dict], *key) -> dict:
    """States of all ranks by (parameter, state)."""
    return {
        (name, kind): value
        for rank in found
        for name, state in rank[key]["states"].items()
        for kind, value in state.items()
    }


@pytest.mark.parametrize("name", WHOLE)
def test_divided_steps_have_the_bits_of_undivided_ones(ranks, name):
    _, found = ranks
    for rank in found:
        for stage, micro_steps in ((1, 2), (2, 1)):
            assert equal_tensors(rank[name, stage, micro_steps]["weights"], found[0][name, 0, micro_steps]["weights"])
            undivided = {key: value for key, value in _merged(found[:1], name, 0, micro_steps).items()}
            assert equal_tensors(_merged(found, name, stage, micro_steps), undivided)
        for key, value in rank[name, 2, 2]["weights"].items():
            assert torch.equal(value, found[0][name, 2, 2]["weights"][key]), "alike on all ranks"


@pytest.mark.parametrize("name", WHOLE)
def test_divided_steps_are_those_of_one_process(ranks, name):
    """To the bit on two ranks, whose sums have but one order."""
    _, found = ranks
    for stage, micro_steps in ((1, 2), (2, 2)):
        expected = plain_division(name, len(found), micro_steps, ranks_first=stage == 2)
        weights = found[0][name, stage, micro_steps]["weights"]
        if len(found) == 2:
            assert equal_tensors(weights, expected)
        elif name != "muon":  # whose iterations magnify the difference of the sums
            assert max((weights[each] - expected[each]).abs().max() for each in expected) < TOLERANCE


@pytest.mark.parametrize("name", WHOLE)
def test_each_parameter_has_one_owner_with_its_states_and_gradient(ranks, name):
    _, found = ranks
    for stage, micro_steps in ((1, 2), (2, 1), (2, 2)):
        table = found[0][name, stage, micro_steps]["owners"]
        assert set(table.values()) == set(range(len(found))), "every rank has work"
        for number, rank in enumerate(found):
            of_rank = rank[name, stage, micro_steps]
            own = {each for each, owner in table.items() if owner == number}
            assert of_rank["owners"] == table and set(of_rank["states"]) == set(of_rank["fragments"]) == own
            assert len(of_rank["gradients"]) == len(RATES)
            assert all(set(each) == own for each in of_rank["gradients"])


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(5, marks=pytest.mark.slow)], ids="by {}".format)
def test_a_checkpoint_is_loaded_at_any_stage_and_by_any_number_of_ranks(ranks, world_size, tmp_path):
    """Weights and states to the bit; nothing is converted."""
    folder, found = ranks
    loaded = _run(partial(loads_main, folder, tmp_path), world_size, tmp_path)
    for name, saved, stage in loaded[0]:
        expected = _merged(found if saved else found[:1], name, saved, 2)
        assert expected and equal_tensors(_merged(loaded if stage else loaded[:1], name, saved, stage), expected)
        for rank in loaded:
            assert equal_tensors(rank[name, saved, stage]["weights"], found[0][name, saved, 2]["weights"])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_work_is_balanced(world_size, muon, on_gpu):
    """Within a tenth of the mean for BERT-large, as far as its largest tensor allows; alike however names are given."""
    large = BertConfig.preset("large")
    width, inner = large.hidden_size, large.intermediate_size
    shapes = {"word": (30528, width)}
    for layer in range(24):
        shapes |= {f"{layer}.qkv": (3 * width, width), f"{layer}.out": (width, width)}
        shapes |= {f"{layer}.up": (inner, width), f"{layer}.down": (width, inner), f"{layer}.bias": (width,)}
    costs = {
        name: update_cost(shape, muon and name != "word" and len(shape) == 2, on_gpu=on_gpu)
        for name, shape in shapes.items()
    }
    table = owners(costs, world_size)
    loads = [sum(cost for name, cost in costs.items() if table[name] == rank) for rank in range(world_size)]
    mean = sum(loads) / world_size
    assert max(loads) <= 1.1 * max(mean, max(costs.values()))
    assert owners(dict(reversed(costs.items())), world_size) == table


def test_cost_counts_the_products_of_an_iteration():
    """Of a 2 × 3 matrix: A = X Xᵀ (2·2·2·3), A A (2·2·2·2), and its product with X (2·2·2·3), five times."""
    assert update_cost((2, 3), False, on_gpu=True) == 6
    for on_gpu, flops in ((True, 4000), (False, 140)):
        assert update_cost((2, 3), True, on_gpu=on_gpu) == pytest.approx(6 + 5 * (24 + 16 + 24) / flops)
        assert update_cost((3, 2), True, on_gpu=on_gpu) == update_cost((2, 3), True, on_gpu=on_gpu)
    apart = [update_cost(shape, True, on_gpu=True) for shape in ((2, 3), (4, 3))]
    assert update_cost((6, 3), True, on_gpu=True, rows=[2, 4]) == pytest.approx(sum(apart))
    assert update_cost((6, 3), False, on_gpu=True, rows=[2, 4]) == 18, "adamw's, whatever its rows"
    assert update_cost((), False, on_gpu=False) == 1 == math.prod(())
