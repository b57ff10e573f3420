"""The compilers of torch."""

import os
import re

from cloze.launch.system.environment import compilers
from cloze.launch.system.environment.launchers import Environment
from tests.launching import ROOT


def test_the_memory_of_a_job_has_room_for_the_workers_that_compile(monkeypatch):
    """Eight ranks on a machine of 192 cores would start 32 workers each."""
    monkeypatch.setattr(compilers, "usable_cores", lambda: 192)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    compilers.bound_compile_workers(Environment(world_size=8))
    workers = int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
    assert workers == 4
    needed = 8 * (5 + workers * 0.5)  # GB of a rank, and of a worker, which has imported torch
    needed += 2 * 16  # of a model of a billion parameters while it is saved: pinned blocks are powers of two
    for name in ("multi-node", "multi-node-store", "single-node"):
        text = (ROOT / f"launch/clusters/slurm-{name}.sbatch").read_text()
        given = re.search(r"--mem=(\d+)G", text)
        assert given is not None and int(given[1]) >= 1.5 * needed, "with as much again for the page cache of shards"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    compilers.bound_compile_workers(Environment(world_size=8))
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "7"
