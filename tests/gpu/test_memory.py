"""What a step of each recipe holds at most on a GPU, by the real engine, and by `cloze plan`."""

from __future__ import annotations

import pytest

from cloze.launch import commands
from cloze.launch.tools.plan import make_estimator
from tests.gpu.cases import Copied, Recipe

PROCESSES = 8
# Masked shares of the data that recipes are for (configs/prepare/), where they are not BERT's.
MASKED = {"mosaicbert-base": 0.30, "crammed-24h": 0.25, "modernbert-base-phase1": 0.30}
FAST = "bert-base-phase1", 0
RUNS = [
    (recipe, 0)
    for recipe in (
        "bert-base-phase1",
        "bert-large-phase2",  # that of phase 1 and of both by LAMB have its layers
        "nvidia-lamb-large-phase2",
        "academic-24h",
        "mosaicbert-base",
        "crammed-24h",
        "modernbert-base-phase1",
    )
] + [("bert-base-phase1", stage) for stage in (2, 3)]


@pytest.mark.parametrize(
    ("recipe", "stage"), [pytest.param(*run, marks=[] if run == FAST else pytest.mark.slow) for run in RUNS]
)
def test_the_largest_micro_batch_of_a_recipe_fits_into_its_card_as_it_was_planned(peak_bytes, recipe, stage):
    """Sequences of the greatest length, which memory has to be enough for, in two micro-steps."""
    planned = commands.parse(
        "plan",
        [
            "--config",
            recipe,
            "--device",
            "h100",
            "--gpus",
            str(PROCESSES),
            "--zero.stage",
            str(stage),
            "--masked_share",
            str(MASKED.get(recipe, 0.15)),
        ],
    )
    estimator = make_estimator(planned)
    size = estimator.largest_micro_batch(stage)
    batch = estimator.lengths.largest(size)
    expected = estimator.memory(stage, size)
    found = peak_bytes(Recipe(recipe, stage, PROCESSES, size, batch.lengths[0], batch.masked // size))
    assert found < 80e9
    assert found == pytest.approx(expected.tensors, rel=0.05), expected


def test_a_checkpoint_is_copied_into_pinned_memory_while_training_goes_on(worker):
    """Each storage once; only the thread that writes waits, for the event behind the copies."""
    found = worker(Copied(3))
    assert found["copies"] == {"cuda to cpu": 3} and found["waits"] == {}
    assert found["events"] == [0, 1] and found["devices"] == ["cpu"] and found["tied"]
