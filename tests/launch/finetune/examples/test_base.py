"""How the examples of a global batch are divided among ranks and micro-steps."""

import numpy as np

from cloze.launch.finetune.examples.base import deal


def test_lengths_at_a_micro_step_are_alike_over_ranks():
    lengths = np.random.default_rng(0).integers(5, 100, 64)
    rows = [deal(lengths, 4, rank, 4) for rank in range(4)]
    for step in range(4):
        found = np.concatenate([lengths[rows[rank][step]] for rank in range(4)])
        assert found.max() <= np.sort(lengths)[16 * (step + 1) - 1] and found.min() >= np.sort(lengths)[16 * step]
    assert np.array_equal(np.sort(np.concatenate([np.concatenate(r) for r in rows])), np.arange(64))
