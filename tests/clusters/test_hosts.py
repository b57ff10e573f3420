"""torchrun on two hosts with addresses of their own, which meet over the network: as two processes on one host."""

import subprocess

import pytest

from cloze.launch.system.environment import child_variables
from tests.clusters.hosts import HOSTS, on
from tests.launching import PATIENCE_SECONDS, ROOT, assert_same_weights, curve, pretrain_command, train, weights

pytestmark = pytest.mark.slow
RUN = ("--train.max_steps", "40", "--checkpoint.every_steps", "20")
MEETING = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host-a:29400", "--rdzv-id", "cloze")


def start_on_both(folder, command: list[str]) -> list[str]:
    """Run `python -m torch.distributed.run --nnodes 2 ...` on each host, a core each, and return what they print."""
    processes = []
    for core, host in enumerate(HOSTS):
        launcher = [command[0], "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *MEETING]
        whole = on(host, folder, "taskset", "--cpu-list", str(core), *launcher, *command[1:])
        processes.append(subprocess.Popen(
            whole, cwd=ROOT, env=child_variables(PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1"), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ))
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return outputs


def test_two_hosts_end_with_the_weights_of_two_local_processes(hosts, shards, tmp_path):
    run = tmp_path / "run"
    outputs = start_on_both(hosts, pretrain_command(shards, run, *RUN))
    assert "2 x CPU" in outputs[0] + outputs[1]
    train(shards, tmp_path / "local", *RUN, processes=2)
    assert curve(run) == curve(tmp_path / "local")
    assert_same_weights(weights(run), weights(tmp_path / "local"))
