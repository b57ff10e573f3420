"""Crafted checkpoints with the right hashes, and the runs that resume from them: a line, or nothing that is wrong."""

from __future__ import annotations

import shutil

import pytest
import torch

from cloze.launch.checkpoint.deepspeed_files import MODEL_FILE
from tests.hostile_states import RUN, SAVED, STEPS, attacks, resumed
from tests.launch.checkpoint.small_checkpoints import rewrite
from tests.launching import train
from tests.synthetic import make_shards


def test_what_failed_in_the_first_step_or_in_an_assertion_is_a_line(tmp_path):
    """Of LAMB, divided: a moment of another size, DeepSpeed's count of processes, a file too many."""
    data, whole = make_shards(tmp_path / "data"), tmp_path / "whole"
    options = (*RUN, "--optimizer.name", "lamb", "--zero.stage", "1")
    train(data, whole, *options)
    shutil.rmtree(whole / f"checkpoints/step-{STEPS:08d}")

    def moment(content: dict) -> None:
        next(iter(content["states"].values()))["exp_avg"] = torch.ones(3)

    for file, change in (("optimizer-00000.pt", moment), (MODEL_FILE, lambda content: content.update(mp_world_size=2))):
        run = tmp_path / file
        shutil.copytree(whole, run)
        rewrite(run / f"checkpoints/step-{SAVED:08d}" / file, change)
        assert resumed(data, run, options) is None
        assert not (run / f"checkpoints/step-{STEPS:08d}").exists(), "it was refused"


@pytest.mark.slow
def test_crafted_checkpoints_end_in_a_line(tmp_path):
    """All optimizers, at ZeRO 0 to 2."""
    lost = [f"{kind}: {wrong}" for kind, wrong in attacks(tmp_path, 80, 1) if wrong]
    assert not lost, "\n".join(lost)
