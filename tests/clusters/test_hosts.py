"""torchrun on two hosts with addresses of their own, which meet over the network: as two processes on one host."""

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloze.launch.system.environment.launchers import child_variables
from tests.clusters.hosts import HOSTS, on
from tests.launching import PATIENCE_SECONDS, ROOT, assert_same_weights, curve, pretrain_command, train, weights

pytestmark = pytest.mark.slow
RUN = ("--train.max_steps", "40", "--checkpoint.every_steps", "20")
# A run that stands still says where, with its stacks, long before the test loses patience.
WATCHED = ("--monitor.hang_seconds", "60", "--monitor.heartbeat_seconds", "5")
MEETING = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host-a:29400", "--rdzv-id", "cloze")


def start_on_both(hosts, command: list[str], printed: Path) -> list[str]:
    """Run `python -m torch.distributed.run --nnodes 2 ...` on each host, a core each, and return what they print."""
    launcher = [command[0], "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *MEETING]
    files = [printed / f"{host}.txt" for host in HOSTS]
    with ExitStack() as stack:
        processes = [
            subprocess.Popen(
                on(host, hosts, "taskset", "--cpu-list", str(core), *launcher, *command[1:]),
                cwd=ROOT,
                env=child_variables(PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1"),
                stdout=stack.enter_context(file.open("w")),
                stderr=subprocess.STDOUT,
            )
            for core, (host, file) in enumerate(zip(HOSTS, files, strict=True))
        ]
        end = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.1)
        for process in processes:
            process.kill()
    outputs = [file.read_text() for file in files]
    assert [process.wait() for process in processes] == [0, 0], "\n".join(outputs)
    return outputs


def test_two_hosts_end_with_the_weights_of_two_local_processes(hosts, shards, tmp_path):
    run = tmp_path / "run"
    outputs = start_on_both(hosts, pretrain_command(shards, run, *RUN, *WATCHED), tmp_path)
    assert "2 x CPU" in outputs[0] + outputs[1]
    train(shards, tmp_path / "local", *RUN, processes=2)
    assert curve(run) == curve(tmp_path / "local")
    assert_same_weights(weights(run), weights(tmp_path / "local"))
