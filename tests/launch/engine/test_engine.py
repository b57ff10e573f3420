"""The engine's contract at every ZeRO stage, on one and two ranks, against a plain loop in torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cloze.launch.engine.engine import Engine
from tests.contract import CLIPPING, POISONED, RATES, STAGES, contract_main, equal_tensors, plain
from tests.forked import ForkedRun

# Sums in another order: of gradients over micro-batches and ranks, and of the norm over parts. AdamW moves a weight by
# up to the rate, whatever the gradient's size; a wrong gradient would move it by as much.
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request, tmp_path_factory) -> tuple[list[dict], dict]:
    """What each rank has found at each stage, and what the plain loop did."""
    folder = tmp_path_factory.mktemp("contract")
    cases = [(stage, "fp32") for stage in STAGES] + ([(0, "bf16"), (2, "bf16")] if request.param == 2 else [])
    run = ForkedRun([], request.param, partial(contract_main, cases, folder), compiler=True)
    output, _ = run.communicate(300)
    assert run.returncode == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)], plain(request.param)


@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_those_of_a_plain_loop(ranks, stage):
    """Weights after every step, the clipped one and the skipped one included; the outcome says what was done."""
    found, expected = ranks
    for rank in found:
        of_stage = rank[stage, "fp32"]
        for step, (skipped, norm, rate) in enumerate(of_stage["outcomes"]):
            assert skipped == (step == POISONED) and rate == RATES[step]
            if not skipped:
                assert norm == pytest.approx(expected["norms"][step], rel=1e-5) and norm > CLIPPING
            for name, values in of_stage["weights"][step].items():
                assert (values - expected["weights"][step][name]).abs().max() < TOLERANCE, (step, name)
        assert equal_tensors(of_stage["weights"][POISONED], of_stage["weights"][POISONED - 1]), (
            "a skipped step changes nothing"
        )
        assert equal_tensors(of_stage["weights"][-1], found[0][stage, "fp32"]["weights"][-1]), "alike on all ranks"


def test_on_one_rank_stage_0_has_the_bits_of_the_plain_loop(ranks):
    found, expected = ranks
    if len(found) == 1:
        for step, weights in enumerate(found[0][0, "fp32"]["weights"]):
            assert equal_tensors(weights, expected["weights"][step])


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_loads_what_another_saved_goes_on_with_its_bits(ranks, stage):
    found, _ = ranks
    for rank in found:
        of_stage = rank[stage, "fp32"]
        assert equal_tensors(of_stage["resumed"], of_stage["weights"][-1])
        assert of_stage["set"].flatten().tolist() == list(range(of_stage["set"].numel()))
        assert len(of_stage["files"]) == (1 if stage == 0 else len(found) * (1 + (stage == 3)) + (stage < 3))


@pytest.mark.parametrize("stage", STAGES)
def test_fragments_of_all_ranks_are_the_weights(ranks, stage):
    """Each rank's masters by name and place; what pads the last part of a parameter is beyond its end."""
    found, _ = ranks
    weights = found[0][stage, "fp32"]["weights"][-1]
    for name, whole in weights.items():
        covered = torch.full((whole.numel(),), float("nan"))
        for rank in found:
            if name in rank[stage, "fp32"]["masters"]:
                start, part = rank[stage, "fp32"]["masters"][name]
                part = part[: whole.numel() - start]
                covered[start : start + len(part)] = part
        assert torch.equal(covered, whole.flatten()), name


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_is_watched_where_it_happens(ranks, stage):
    """Gradients are clipped by then; norms of the parts of all ranks make up the whole."""
    found, expected = ranks
    watched = [rank[stage, "fp32"]["seen"] for rank in found[: 1 if stage == 0 else None]]
    for step in range(len(RATES)):
        gradient, update = (sum(rank[step][number] for rank in watched) ** 0.5 for number in (0, 1))
        if step == POISONED:
            assert gradient == update == 0.0, "nothing is updated"
            continue
        assert gradient == pytest.approx(CLIPPING, rel=1e-4)
        if step:
            weights, before = (expected["weights"][number] for number in (step, step - 1))
            moved = sum(float((weights[name] - before[name]).double().square().sum()) for name in weights) ** 0.5
            assert update == pytest.approx(moved, rel=1e-3)


def test_the_dtype_is_that_of_the_live_engine(ranks):
    found, _ = ranks
    assert all(found[0][stage, "fp32"]["precision"] == "fp32 products, fp32 parameters" for stage in STAGES)
    if len(found) == 2:
        assert found[0][0, "bf16"]["precision"] == "bf16 products, fp32 parameters"
        assert found[0][2, "bf16"]["precision"] == "bf16 products, bf16 parameters with fp32 master copies"
        assert {found[0][stage, "bf16"]["dtype"] for stage in (0, 2)} == {"torch.bfloat16"}


def test_the_door_is_narrow():
    """Rooms above see ten methods at most, in the field's words; DeepSpeed's object is private."""
    methods = [name for name, value in vars(Engine).items() if callable(value) and not name.startswith("_")]
    assert len(methods) <= 10, methods
