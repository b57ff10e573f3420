"""A world of 1,024 ranks at each ZeRO stage: who updates what, and who writes which file of a checkpoint."""

from __future__ import annotations

from functools import partial

import pytest

from cloze.launch import commands
from cloze.launch.tools.plan import make_estimator
from cloze.launch.tools.planning.memory import share
from tests.gpu.large_world import LAYERS, Place

WORLD_SIZE = Place(1).world_size
STAGES = [1, 2, 3]
STATES = 12  # bytes an element of fp32 masters and two moments


def elements(fragments) -> int:
    return sum(length for _, _, length in fragments)


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_together_update_every_element_once_and_none_much_more_than_others(part, stage):
    found = part(Place(stage))
    assert len(found.fragments) == WORLD_SIZE and sum(found.parameters.values()) > 3.5e7
    seen = {name: [] for name in found.parameters}
    for fragments in found.fragments:
        for name, start, length in fragments:
            seen[name].append((start, length))
    for name, places in seen.items():
        end = 0
        for start, length in sorted(places):
            assert start == end and length > 0, name
            end += length
        assert end == found.parameters[name], name
    counts = [elements(fragments) for fragments in found.fragments]
    assert max(counts) <= 1.02 * sum(counts) / WORLD_SIZE
    assert found.padded <= 1.02 * share(sum(counts), WORLD_SIZE), "and so do the padded parts, which memory holds"


@pytest.mark.parametrize("stage", STAGES)
def test_no_two_ranks_write_the_same_file_and_the_sizes_add_up(part, stage):
    found = part(Place(stage))
    names = [name for rank in found.names for name in rank]
    assert len(found.names) == WORLD_SIZE and len(set(names)) == len(names)
    assert found.names[0] == sorted(found.files), "as the rank that was asked writes them"
    # The weights by which forward computes: at stage 3 each rank notes its own, which hold no numbers.
    assert [len(rank) for rank in found.names[1:]] == [3 if stage == 3 else 2] * (WORLD_SIZE - 1)
    weights, states = (
        sum(size for name, size in found.files.items() if name.endswith(kind))
        for kind in ("model_states.pt", "optim_states.pt")
    )
    # Every rank's are of its padded part; torch's step counters and what DeepSpeed notes are some bytes more.
    assert states == pytest.approx(STATES * found.padded, rel=0.001)
    planned = make_estimator(
        commands.parse(
            "plan",
            [
                "--config",
                "bert-base-phase1",
                "--device",
                "h100",
                "--gpus",
                str(WORLD_SIZE),
                "--zero.stage",
                str(stage),
                "--model.num_hidden_layers",
                str(LAYERS),
                "--train.global_batch_size",
                str(WORLD_SIZE),
            ],
        )
    )
    assert planned.parameters == sum(found.parameters.values())
    assert planned.checkpoint_bytes(stage) == pytest.approx(weights + states * WORLD_SIZE, rel=0.01)


# A rank costs some seconds, so most of them are looked at in the slow run: one amid, and the last one, whose part is
# short.
BUILT = [
    (1, WORLD_SIZE - 1),
    *(
        pytest.param(stage, rank, marks=pytest.mark.slow)
        for stage in STAGES
        for rank in (511, WORLD_SIZE - 1)
        if (stage, rank) != (1, WORLD_SIZE - 1)
    ),
]


@pytest.mark.parametrize(("stage", "rank"), BUILT)
def test_a_rank_that_is_built_is_as_predicted(part, stage, rank):
    told, found = part(Place(stage)), part(Place(stage, rank, everyone=False))
    assert found.own == told.fragments[rank] and sorted(found.files) == told.names[rank]
    assert found.padded == told.padded and 0 < elements(found.own) <= found.padded
    states = partial(filter, lambda name: "optim_states" in name)
    sizes = [file[name] for file in (found.files, told.files) for name in states(file)]
    assert len(sizes) == 2 and sizes[0] == pytest.approx(sizes[1], rel=0.001)
