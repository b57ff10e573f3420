"""Gradients that are sent while backward runs are those that are sent after it, bit for bit, whatever the ranks do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from cloze.launch.engine.summing import GradientSums, buckets_of
from tests.forked import ForkedRun
from tests.summed import POISONED, STEPS, Variant, engine_main, failing_main, odd_main

PATIENCE_SECONDS = 300
ONE, SOME, ALL = 1, 200_000, 1 << 40  # bytes of a bucket: a parameter each, several, one for all


def told(folder: Path, processes: int, main, compiler: bool = False) -> list:
    """What each rank has found."""
    run = ForkedRun([], processes, main, compiler)
    output, _ = run.communicate(PATIENCE_SECONDS)
    assert run.returncode == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


def same_bits(first, second) -> bool:
    return all(
        torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    "variant",
    [
        Variant(ONE),
        Variant(SOME),
        Variant(ALL),
        Variant(SOME, "bf16"),
        Variant(SOME, "bf16", copies=True),
        Variant(SOME, gradient_checkpointing="all"),
        pytest.param(Variant(SOME, "bf16", copies=True, compiled=True), marks=pytest.mark.slow),
    ],
    ids=lambda variant: " ".join(f"{name}={value}" for name, value in vars(variant).items() if value),
)
def test_the_engines_gradients_are_those_that_deepspeed_sums_after_backward(tmp_path, variant):
    """Several micro-steps, a tied embedding, dropout, a head without gradient in the last micro-step or on a rank, and
    a step that is skipped."""
    both = [replace(variant, by_deepspeed=True), variant]
    ranks = told(tmp_path, 2, partial(engine_main, both, tmp_path), variant.compiled)
    for expected, found in ranks:
        assert len(found["gradients"]) == STEPS
        for step, (one, other) in enumerate(zip(expected["gradients"], found["gradients"], strict=True)):
            assert any(each.isnan().any() for each in other.values()) == (step == POISONED)
            assert same_bits(one.values(), other.values())
        assert same_bits(expected["weights"].values(), found["weights"].values())
        assert same_bits(found["weights"].values(), ranks[0][1]["weights"].values())
        assert expected["sent"] == [] and found["sent"] == ranks[0][1]["sent"]
        assert found["hooks"] == 0
    for rank, (_, found) in enumerate(ranks):
        count = {ONE: len(found["weights"]), SOME: 9, ALL: 1}[variant.size]
        assert len(found["sent"]) == count
        # Sent before backward ends: all buckets, or none where the head of pairs, which is in the first, is missed.
        assert found["inside"] == [count, 0, 0 if rank else count, count]


@pytest.mark.parametrize("processes", [2, 3])
def test_odd_parameters_and_orders(tmp_path, processes):
    """Two numbers have one sum; of three ranks gloo adds up in an order that depends on where in a bucket they lie."""
    ranks = told(tmp_path, processes, partial(odd_main, [ONE, 100, ALL], tmp_path))
    for rank, found in enumerate(ranks):
        by = {(each["size"], each["way"]): each for each in found}
        for size in (ONE, 100, ALL):
            inside, after, alone = (by[size, way] for way in ("in backward", "after", "alone"))
            assert same_bits(inside["gradients"], after["gradients"])
            for one, other in zip(inside["gradients"], alone["gradients"], strict=True):
                assert torch.equal(one, other) if processes == 2 else torch.allclose(one, other, rtol=1e-6, atol=1e-6)
            assert all(inside["aligned"]) and inside["others"] == [None, None]
            assert inside["sent"] == after["sent"] and after["inside"] == 0
        assert [len(by[size, "after"]["sent"]) for size in (ONE, 100, ALL)] == [7, 5, 1]
        # In backward, all before the one that not even this rank has a gradient of.
        assert [by[size, "in backward"]["inside"] for size in (ONE, 100, ALL)] == [5 if rank else 6, 4, 0]
    for each in zip(*ranks, strict=True):
        assert all(other["sent"] == each[0]["sent"] for other in each)
        assert all(same_bits(other["gradients"], each[0]["gradients"]) for other in each)


def test_an_error_in_backward_on_all_ranks_leaves_nothing_to_the_next_step(tmp_path):
    ranks = told(tmp_path, 2, partial(failing_main, [0, 1], tmp_path))
    assert all(each.any() for each in ranks[0]) and same_bits(*ranks)


def test_an_error_in_backward_on_one_rank_ends_the_other_too(tmp_path):
    run = ForkedRun([], 2, partial(failing_main, [0], tmp_path))
    output, _ = run.communicate(60)
    assert run.returncode != 0 and (tmp_path / "1.txt").read_text() == "True", output


def test_a_gradient_that_comes_twice_is_an_error(monkeypatch):
    """As with reentrant checkpoints of a shared weight: what was sent first would be a part."""
    monkeypatch.setattr("cloze.launch.system.distributed.begin_sum", lambda values: lambda: None)
    weight = nn.Parameter(torch.ones(3))
    sums = GradientSums([weight], 2, ONE)
    with sums.sending():
        weight.sum().backward()
        with pytest.raises(RuntimeError, match=r"a gradient of shape \(3,\) was added to after it had been sent"):
            weight.sum().backward()
    weight.sum().backward()  # and the hook is gone


def test_buckets_leave_the_large_embedding_alone_and_send_the_rest_first():
    sizes = [100, 1, 2, 3, 4, 5, 1]
    found = buckets_of([nn.Parameter(torch.zeros(size)) for size in sizes], 4 * 6)
    assert [[each.numel() for each in group] for group in found] == [[100], [1, 2, 3], [4, 5], [1]]
    assert buckets_of([], 5) == []
