"""Slurm's job file for machines without a shared disk: the run's status in the store decides what the job does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloze.launch.system.environment.launchers import child_variables
from cloze.pipeline.stores.places import to_place
from tests.launching import PATIENCE_SECONDS, ROOT, TINY
from tests.synthetic import make_shards

JOB = ROOT / "launch" / "clusters" / "slurm-multi-node-store.sbatch"
# The command behind its options, in one process. It says 137 of the run, as when another one dies at the very end.
SRUN = """while [ "$1" != python ]; do shift; done
"$@" || exit 137"""


@pytest.fixture
def submit(bucket, tmp_path):
    """Runs the job file as Slurm does, but for srun and scontrol; gives its exit status and whether it is requeued."""
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    for name, script in {"srun": SRUN, "scontrol": f"echo $* > {asked}"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])

    def run(data: Path, *options: str, end: float) -> tuple[int, bool]:
        asked.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(JOB), f"{bucket}/runs/own", *TINY, "--data", str(data), *options],
            cwd=ROOT,
            timeout=PATIENCE_SECONDS,
            env=child_variables(
                PATH=path,
                SLURM_JOB_ID="7",
                SLURM_JOB_END_TIME=str(int(end)),
                SLURM_CPUS_PER_TASK="1",
                CLOZE_SCRATCH=str(tmp_path / "scratch"),
                OMP_NUM_THREADS="1",
            ),
        )
        assert not asked.exists() or asked.read_text() == "requeue 7\n"
        return done.returncode, asked.exists()

    return run


@pytest.mark.slow
def test_the_job_is_requeued_by_the_status_in_the_store(submit, bucket, tmp_path):
    data = make_shards(tmp_path / "data")
    run = ("--train.max_steps", "6", "--train.stop_before_seconds", "100")
    assert submit(data, *run, end=time.time()) == (0, True)  # stops at once, and asks to go on
    assert "\n  grace_seconds: 600.0\n" in to_place(f"{bucket}/runs/own/config.yaml").read_text()  # that of --signal
    wrong = ("--train.max_steps", "0")
    assert submit(data, *wrong, end=time.time()) == (1, False)  # a start that fails is not repeated
    assert list((tmp_path / "scratch" / "runs").glob("own-*/checkpoints/step-*"))
    assert submit(data, *run, end=time.time() + 3600) == (0, False)
    assert '"state": "complete"' in _newest_status(f"{bucket}/runs/own/log")


def _newest_status(log: str) -> str:
    keys = [each.key for each in to_place(log).objects() if "/status.json." in each.key]
    return to_place(log).at(max(keys)).read_text()
