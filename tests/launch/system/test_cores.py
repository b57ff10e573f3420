"""The cores that a process may use, and its threads."""

import os

import pytest
import torch

from cloze.launch.system.cores import usable_cores
from cloze.launch.system.environment import process
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.environment.process import prepare_deepspeed, protect_process
from tests.launch.system.test_memory import write


@pytest.mark.parametrize(
    ("known", "files"),
    [
        ("0::/pod/box\n", {"pod/cpu.max": "250000 100000\n", "pod/box/cpu.max": "max 100000\n"}),
        (
            "5:cpu,cpuacct:/box\n0::/\n",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n"},
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, known, files):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    write(tmp_path, {"proc/self/cgroup": known})
    assert usable_cores(tmp_path) == 8
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert usable_cores(tmp_path) == 2
    write(tmp_path, {f"sys/fs/cgroup/{name}": text.replace("250000", "50000") for name, text in files.items()})
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("given", "processes", "threads"),
    [(None, 1, 5), ("7", 1, 6), ("1", 2, 2), (None, 2, 2), ("7", 2, 6)],
)
def test_threads_are_no_more_than_cores_unless_the_user_says_so(monkeypatch, given, processes, threads):
    """torch's own number here is 6, and the process may use 5 cores."""
    monkeypatch.setattr(process, "usable_cores", lambda: 5)
    monkeypatch.setattr(os, "environ", {"DS_ACCELERATOR": "cpu"} | ({"OMP_NUM_THREADS": given} if given else {}))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        prepare_deepspeed(Environment(world_size=processes))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(monkeypatch, given):
    monkeypatch.setattr(os, "environ", dict(given))
    protect_process()
    kept = {name: value for name, value in os.environ.items() if name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    assert kept == (given or {"GOMP_SPINCOUNT": "100"})
