"""Checkpoints on local disks before they are in the store."""

from __future__ import annotations

from cloze.launch.checkpoint.local_checkpoints import Found, whole_on_all
from cloze.launch.checkpoint.state import hash_of_files


def test_only_what_all_machines_have_of_one_checkpoint_is_whole():
    def found(step: int, *names: str, whole: str = "") -> Found:
        return Found(step, whole, {name: (1, f"{step} {name}") for name in names})

    a, b, shared = "rank-00000.pt", "rank-00001.pt", "mp_rank_00_model_states.pt"
    whole = {step: hash_of_files(found(step, a, b, shared).files) for step in (4, 5)}
    one, other = found(5, a, shared, whole=whole[5]), found(5, b, whole=whole[5])
    older = [found(4, a, shared, whole=whole[4]), found(4, b, whole=whole[4])]
    machines = [[0], [1]]
    assert whole_on_all([[one, older[0]], [other, older[1]]], machines) == [one, other]
    assert whole_on_all([[one, older[0]], [older[1]]], machines) == older
    assert whole_on_all([[one], [older[1]]], machines) is None
    # Of the same step, of another start that has gone another way.
    assert whole_on_all([[one], [found(5, b, whole="another")]], machines) is None
    # The machines have changed places.
    assert whole_on_all([[other], [one]], machines) is None
    assert whole_on_all([[one, older[0]], []], machines) is None
