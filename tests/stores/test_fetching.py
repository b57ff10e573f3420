"""Files of a checkpoint, fetched."""

from __future__ import annotations

import pytest

from cloze.launch.checkpoint.fetching import owner_of


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("mp_rank_00_model_states.pt", None),
        ("rank-00012.pt", 12),
        ("ema-rank-00012.pt", 12),
        ("optimizer-00012.pt", 12),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", 3),
        ("bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt", 10),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", 0),
    ],
)
def test_whose_a_file_is(name, owner):
    assert owner_of(name) == owner
